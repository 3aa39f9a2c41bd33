"""Finds the heads for a target, and refuses those of another one. Imports no vLLM."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_bpd.checkpoint import (
    CONFIG_FILE,
    PICKLE_SUFFIXES,
    WEIGHTS_FILE,
    check_weights,
    read_config,
)
from vllm_bpd.config import HeadsConfig, TargetFingerprint
from vllm_bpd.errors import HeadsError, shown
from vllm_bpd.fingerprint import explain_mismatch, lm_head_hash, read_fingerprint

HEADS_FOLDER = "bpd_heads"
_WEIGHTS = "*.safetensors"  # of a target, maybe in shards
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
    download_dir: str | None = None,
) -> FoundHeads:
    """Heads for the target in folder or hub repository `target`, at `target_revision`.

    Its weights may be in `download_dir`, or come only later: see `check_weights_on_disk`. `heads`
    (a folder or hub id, at `revision`) names them; without it they are looked for inside the
    target, then among those shipped with this package. Raises HeadsError: no heads, or heads that
    are damaged or were trained for another target.
    """
    target_folder = resolve_target(target, target_revision)
    weights = weights_folder(target, target_revision, download_dir)
    fingerprint = None if target_folder is None else read_fingerprint(target_folder, weights)
    if heads is not None:
        found = _named(heads, revision, token)
    else:
        inside = _inside_target(target, target_folder, target_revision, token)
        shipped = inside or _shipped(fingerprint)
        if shipped is None:
            if not Path(target).is_dir():
                _say_what_to_download(target, fingerprint, weights, target_revision, download_dir)
            raise HeadsError(
                f"model: no heads found for {target}; looked in {HEADS_FOLDER}/ of the target and "
                f"among the heads shipped with vllm-bpd ({', '.join(shipped_names()) or 'none'}); "
                f"train some with `bpd-train all --target {target} --output DIR` and give "
                '{"method": "bpd", "model": "DIR"}'
            )
        found = shipped
    check_weights(found.folder, found.config)
    if fingerprint is not None:
        _check_target(found.folder, found.config.target, fingerprint)
    return found


def check_weights_on_disk(
    folder: Path, config: HeadsConfig, weights: Path | None, tied: bool | None
) -> None:
    """Raise HeadsError if the heads in `folder` were trained for other weights than these.

    A target of the hub is downloaded after its heads were found, by the workers: so at a first
    start only they can compare LM heads. `tied` is what the target's config says of its embedding.
    """
    ours = config.target
    if weights is not None:
        found = lm_head_hash(weights, ours.vocab_size, ours.hidden_size, tied)
        _check_target(folder, ours, replace(ours, lm_head_hash=found))


def _check_target(folder: Path, ours: TargetFingerprint, theirs: TargetFingerprint) -> None:
    mismatch = explain_mismatch(ours, theirs)
    if mismatch:
        raise HeadsError(
            f"{folder}: these heads belong to another target; {mismatch}; train heads for "
            "this one with `bpd-train all`"
        )


def resolve_target(target: str, revision: str | None = None) -> Path | None:
    """Local folder of the target: itself, or what the hub cache holds; None if neither."""
    if Path(target).is_dir():
        return Path(target)
    return from_hub(target, revision, None, ["config.json"], local_only=True)


def weights_folder(
    target: str, revision: str | None = None, download_dir: str | None = None
) -> Path | None:
    """Local folder of the target's weights, which may lack them still; None if there is none.

    With a `download_dir` the engine puts weights there, but config.json into the hub's own cache.
    """
    folder = resolve_target(target, revision)
    if download_dir is None or Path(target).is_dir():
        return folder
    commit = revision if folder is None else folder.name  # a branch may have moved since
    # No pattern: what the engine leaves out of a repository must not make it count as incomplete.
    there = from_hub(target, commit, None, [], local_only=True, cache_dir=download_dir)
    return there or folder


def shipped_names() -> list[str]:
    """Names of the heads inside this package."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG_FILE}"))


def _named(heads: str, revision: str | None, token: str | bool | None) -> FoundHeads:
    if not heads.strip():
        raise HeadsError("model: found an empty name; expected a folder of heads or a hub id")
    path = Path(heads)
    # Unlike Path.exists, it takes a name too long for the file system.
    if os.path.exists(heads) or path.suffix in PICKLE_SUFFIXES:
        return FoundHeads(path, read_config(path), f"folder {path}")
    folder = None
    if heads.count("/") == 1 and not heads.startswith((".", "/", "~")):
        folder = from_hub(heads, revision, token, [CONFIG_FILE, WEIGHTS_FILE])
    if folder is None:
        raise HeadsError(
            f"model: {shown(heads)} is neither a folder of heads nor a repository that could be "
            f"had from the hub; expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or "
            "a hub id"
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


def _shipped(target: TargetFingerprint | None) -> FoundHeads | None:
    """Shipped heads whose target is this one, LM-head rows included."""
    if target is None:
        return None
    for name in shipped_names():
        config = read_config(SHIPPED / name)
        if config.target == target and target.lm_head_hash is not None:
            return FoundHeads(SHIPPED / name, config, f"shipped with vllm-bpd as {name}")
    return None


def _say_what_to_download(
    target: str,
    fingerprint: TargetFingerprint | None,
    weights: Path | None,
    revision: str | None,
    download_dir: str | None,
) -> None:
    """Raise HeadsError if shipped heads may fit a hub target whose weights are not here yet."""
    if fingerprint is None or (weights is not None and any(weights.glob(_WEIGHTS))):
        return
    for name in shipped_names():
        ours = read_config(SHIPPED / name).target
        if replace(fingerprint, lm_head_hash=ours.lm_head_hash) == ours:
            options = f" --revision {revision}" if revision else ""
            options += f" --cache-dir {download_dir}" if download_dir else ""
            raise HeadsError(
                f"model: no heads found for {target}: whether those shipped as {name} are its own "
                "shows in its weights, which are not downloaded yet; run "
                f"`hf download {target}{options}` and start again, or name heads as "
                '{"method": "bpd", "model": "DIR_OR_HUB_ID"}'
            )


def from_hub(
    repository: str,
    revision: str | None,
    token: str | bool | None,
    patterns: list[str],
    local_only: bool = False,
    cache_dir: str | None = None,
) -> Path | None:
    """Snapshot folder of `repository` with files of these patterns, or None if not to be had.

    `cache_dir` is the cache it lies in; None: the hub's own.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            token=token,
            allow_patterns=patterns,
            local_files_only=local_only,
            cache_dir=cache_dir,
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        logger.debug("%s: not to be had from the hub: %s", repository, error)
        return None
    return Path(folder)
