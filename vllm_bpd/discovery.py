"""Finds the heads for a target, and refuses those of another one. Imports no vLLM."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from vllm_bpd.checkpoint import (
    CONFIG_FILE,
    PICKLE_SUFFIXES,
    WEIGHTS_FILE,
    check_weights,
    read_config,
)
from vllm_bpd.config import HeadsConfig
from vllm_bpd.errors import HeadsError
from vllm_bpd.fingerprint import explain_mismatch, read_fingerprint

HEADS_FOLDER = "bpd_heads"
SHIPPED = Path(__file__).parent / "shipped"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundHeads:
    """Heads that fit a target."""

    folder: Path  # local folder with config.json and model.safetensors
    config: HeadsConfig  # its strict config
    source: str  # where they were found, in words


def find_heads(
    target: str,
    heads: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    target_revision: str | None = None,
) -> FoundHeads:
    """Heads for the target in folder or hub repository `target`, at `target_revision`.

    `heads` (a folder or hub id, at `revision`) names them; without it they are looked for inside
    the target, then among those shipped with this package. Raises HeadsError: no heads, or heads
    that are damaged or were trained for another target.
    """
    target_folder = resolve_target(target, target_revision)
    if heads is not None:
        found = _named(heads, revision, token)
    else:
        inside = _inside_target(target, target_folder, target_revision, token)
        shipped = inside or _shipped(target_folder)
        if shipped is None:
            raise HeadsError(
                f"model: no heads found for {target}; looked in {HEADS_FOLDER}/ of the target and "
                f"among the heads shipped with vllm-bpd ({', '.join(shipped_names()) or 'none'}); "
                f"train some with `bpd-train all --target {target} --output DIR` and give "
                '{"method": "bpd", "model": "DIR"}'
            )
        found = shipped
    check_weights(found.folder, found.config)
    check_target(found, target_folder)
    return found


def check_target(found: FoundHeads, target_folder: Path | None) -> None:
    """Raise HeadsError if the heads were trained for another target than the one given."""
    if target_folder is None:
        return
    mismatch = explain_mismatch(found.config.target, read_fingerprint(target_folder))
    if mismatch:
        raise HeadsError(
            f"{found.folder}: these heads belong to another target; {mismatch}; train heads for "
            "this one with `bpd-train all`"
        )


def resolve_target(target: str, revision: str | None = None) -> Path | None:
    """Local folder of the target: itself, or what the hub cache holds; None if neither."""
    if Path(target).is_dir():
        return Path(target)
    return from_hub(target, revision, None, ["config.json"], local_only=True)


def shipped_names() -> list[str]:
    """Names of the heads inside this package."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG_FILE}"))


def _named(heads: str, revision: str | None, token: str | bool | None) -> FoundHeads:
    if not heads.strip():
        raise HeadsError("model: found an empty name; expected a folder of heads or a hub id")
    path = Path(heads)
    if path.exists() or path.suffix in PICKLE_SUFFIXES:
        return FoundHeads(path, read_config(path), f"folder {path}")
    folder = None
    if heads.count("/") == 1 and not heads.startswith((".", "/", "~")):
        folder = from_hub(heads, revision, token, [CONFIG_FILE, WEIGHTS_FILE])
    if folder is None:
        raise HeadsError(
            f"model: {heads!r} is neither a folder of heads nor a repository that could be had "
            f"from the hub; expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a hub id"
        )
    return FoundHeads(folder, read_config(folder), f"hub repository {heads}")


def _inside_target(
    target: str, target_folder: Path | None, revision: str | None, token: str | bool | None
) -> FoundHeads | None:
    folder = None if target_folder is None else target_folder / HEADS_FOLDER
    if not Path(target).is_dir():
        snapshot = from_hub(target, revision, token, [f"{HEADS_FOLDER}/*"])
        folder = None if snapshot is None else snapshot / HEADS_FOLDER
    if folder is None or not folder.is_dir():
        return None
    return FoundHeads(folder, read_config(folder), f"{HEADS_FOLDER}/ of the target")


def _shipped(target_folder: Path | None) -> FoundHeads | None:
    """Shipped heads whose target is this one, LM-head rows included."""
    if target_folder is None:
        return None
    target = read_fingerprint(target_folder)
    for name in shipped_names():
        config = read_config(SHIPPED / name)
        if config.target == target and target.lm_head_hash is not None:
            return FoundHeads(SHIPPED / name, config, f"shipped with vllm-bpd as {name}")
    return None


def from_hub(
    repository: str,
    revision: str | None,
    token: str | bool | None,
    patterns: list[str],
    local_only: bool = False,
) -> Path | None:
    """Snapshot folder of `repository` with files of these patterns, or None if not to be had."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            token=token,
            allow_patterns=patterns,
            local_files_only=local_only,
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        logger.debug("%s: not to be had from the hub: %s", repository, error)
        return None
    return Path(folder)
