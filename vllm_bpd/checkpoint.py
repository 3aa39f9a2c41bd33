"""Heads on disk: `config.json` and `model.safetensors`, read strictly. Imports no vLLM.

The format is documented in docs/checkpoint-format.md.

Shape suffixes: F joint hidden size, E input size, K heads, D hidden size, V draft vocabulary,
P places of the block, W weights of a place.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_bpd.config import MODEL_TYPE, HeadsConfig
from vllm_bpd.errors import HeadsError, named, read_json
from vllm_bpd.heads import BlockwiseHeads
from vllm_bpd.lattice import NUM_WEIGHTS

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
HIDDEN_WEIGHT = "hidden_layer.weight"
OUTPUT_WEIGHT = "output_layer.weight"
DRAFT_TOKEN_IDS = "draft_token_ids"
LATTICE_WEIGHTS = "lattice_weights"
_FLOAT_DTYPES = {"F32", "F16", "BF16"}
_OTHER_DTYPES = {DRAFT_TOKEN_IDS: {"I32"}, LATTICE_WEIGHTS: {"F32"}}
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


def expected_tensors(config: HeadsConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint and its shape; there may be no other."""
    shapes: dict[str, tuple[int, ...]] = {
        HIDDEN_WEIGHT: (config.joint_hidden_size, config.input_size),
        OUTPUT_WEIGHT: (config.num_draft_heads * config.hidden_size, config.joint_hidden_size),
    }
    if config.draft_vocab_size is not None:
        shapes[DRAFT_TOKEN_IDS] = (config.draft_vocab_size,)
    if config.lattice_places is not None:
        shapes[LATTICE_WEIGHTS] = (config.lattice_places, NUM_WEIGHTS)
    return shapes


def read_config(folder: str | os.PathLike[str]) -> HeadsConfig:
    """The strict config of the heads in `folder`. Raises HeadsError, one line, naming the file."""
    path = Path(folder) / CONFIG_FILE
    _refuse_pickles(Path(folder))
    if not path.is_file():
        raise HeadsError(
            f"{path}: not found; expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, "
            "as `bpd-train` writes it"
        )
    values = read_json(path, "JSON")
    try:
        return HeadsConfig.from_dict(values)
    except HeadsError as error:
        raise HeadsError(f"{path}: {error}") from None


def check_weights(folder: str | os.PathLike[str], config: HeadsConfig) -> None:
    """Compare the weight file's header, and the ids of a draft vocabulary, with the config.

    Reads no weights. Raises HeadsError for a missing, unused or misshapen tensor, a wrong dtype,
    impossible ids, a damaged file.
    """
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise HeadsError(f"{path}: not found; heads are loaded from safetensors only")
    expected = expected_tensors(config)
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for name in sorted(expected.keys() - names):
                raise HeadsError(f"{path}: {name}: missing; expected shape {expected[name]}")
            for name in sorted(names - expected.keys()):
                raise HeadsError(
                    f"{path}: {named(name)}: unused; expected only {', '.join(expected)}"
                )
            for name, shape in expected.items():
                found = file.get_slice(name)
                if tuple(found.get_shape()) != shape:
                    raise HeadsError(
                        f"{path}: {name}: found shape {tuple(found.get_shape())}; "
                        f"{CONFIG_FILE} says {shape}"
                    )
                dtypes = _OTHER_DTYPES.get(name, _FLOAT_DTYPES)
                if found.get_dtype() not in dtypes:
                    raise HeadsError(
                        f"{path}: {name}: found dtype {found.get_dtype()}; "
                        f"expected {' or '.join(sorted(dtypes))}"
                    )
            if DRAFT_TOKEN_IDS in expected:
                check_draft_token_ids(file.get_tensor(DRAFT_TOKEN_IDS), config, f"{path}: ")
            if LATTICE_WEIGHTS in expected:
                check_lattice_weights(file.get_tensor(LATTICE_WEIGHTS), config, f"{path}: ")
    except (SafetensorError, OSError) as error:
        raise HeadsError(f"{path}: not a readable safetensors file ({error})") from None


def load_tensors(folder: str | os.PathLike[str], config: HeadsConfig) -> dict[str, Tensor]:
    """All tensors of the heads in `folder`, checked as `check_weights` does, on the CPU."""
    check_weights(folder, config)
    with safe_open(Path(folder) / WEIGHTS_FILE, framework="pt") as file:
        return {name: file.get_tensor(name) for name in expected_tensors(config)}


def check_draft_token_ids(ids_V: Tensor, config: HeadsConfig, where: str = "") -> None:
    """Ids must ascend strictly (lowest id wins ties then, too) and lie in the vocabulary.

    Raises HeadsError, beginning with `where`, if they do not.
    """
    if ids_V.ndim != 1 or len(ids_V) != config.draft_vocab_size:
        raise HeadsError(
            f"{where}{DRAFT_TOKEN_IDS}: found shape {tuple(ids_V.shape)}; draft_vocab_size is "
            f"{config.draft_vocab_size}"
        )
    ascending = bool((ids_V[1:] > ids_V[:-1]).all())
    if not ascending or int(ids_V[0]) < 0 or int(ids_V[-1]) >= config.target.vocab_size:
        raise HeadsError(
            f"{where}{DRAFT_TOKEN_IDS}: found ids {int(ids_V.min())}..{int(ids_V.max())}, "
            f"{'' if ascending else 'not '}ascending; expected strictly ascending ids in "
            f"0..{config.target.vocab_size - 1}"
        )


def check_lattice_weights(weights_PW: Tensor, config: HeadsConfig, where: str = "") -> None:
    """Weights must be finite, a row for each place. Raises HeadsError, beginning with `where`."""
    expected = (config.lattice_places, NUM_WEIGHTS)
    if tuple(weights_PW.shape) != expected:
        raise HeadsError(
            f"{where}{LATTICE_WEIGHTS}: found shape {tuple(weights_PW.shape)}; expected {expected}"
        )
    if not bool(weights_PW.isfinite().all()):
        raise HeadsError(
            f"{where}{LATTICE_WEIGHTS}: found values that are not finite; train them again"
        )


def load_lattice(folder: str | os.PathLike[str]) -> Tensor | None:
    """Weights of the lattice of `folder`, float32 [P, W], or None if it has none."""
    config = read_config(folder)
    return load_tensors(folder, config).get(LATTICE_WEIGHTS)


def load_heads(
    folder: str | os.PathLike[str], dtype: torch.dtype = torch.float32
) -> tuple[BlockwiseHeads, Tensor | None]:
    """Plain-torch heads of `folder` in `dtype`, and the draft vocabulary (int64 [V]) or None."""
    config = read_config(folder)
    tensors = load_tensors(folder, config)
    ids_V = tensors.pop(DRAFT_TOKEN_IDS, None)
    tensors.pop(LATTICE_WEIGHTS, None)
    heads = BlockwiseHeads(config)
    heads.load_state_dict(tensors)
    return heads.to(dtype), None if ids_V is None else ids_V.long()


def save_heads(
    folder: str | os.PathLike[str],
    heads: BlockwiseHeads,
    draft_token_ids_V: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    extra_files: dict[str, str] | None = None,
    lattice_weights_PW: Tensor | None = None,
) -> None:
    """Write heads whole or not at all: an older checkpoint in `folder` survives any failure.

    `lattice_weights_PW` (see `vllm_bpd.lattice`) decides the config's `lattice_places`.
    `extra_files` maps further file names (provenance, a README) to their text. Nothing else is
    left in `folder`. Raises HeadsError: before writing, if it holds anything but older heads; if
    the disk is full, or cannot be written for another reason.
    """
    places = None if lattice_weights_PW is None else len(lattice_weights_PW)
    config = dataclasses.replace(heads.config, lattice_places=places)
    if (draft_token_ids_V is None) != (config.draft_vocab_size is None):
        raise HeadsError(
            "draft_token_ids: must be given exactly when the config has a draft_vocab_size "
            f"(found {config.draft_vocab_size})"
        )
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in _weights(heads)}
    if draft_token_ids_V is not None:
        check_draft_token_ids(draft_token_ids_V, config)
        tensors[DRAFT_TOKEN_IDS] = draft_token_ids_V.to("cpu", torch.int32).contiguous()
    if lattice_weights_PW is not None:
        check_lattice_weights(lattice_weights_PW, config)
        tensors[LATTICE_WEIGHTS] = lattice_weights_PW.to("cpu", torch.float32).contiguous()
    target = Path(folder).resolve()  # what a link points to is replaced, not the link
    require_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Private, but not what is made in it: heads are as readable as any file the user writes.
    private = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    staging = private / target.name
    try:
        staging.mkdir()
        _write_json(staging / CONFIG_FILE, config.to_dict())
        save_file(tensors, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        (staging / WEIGHTS_FILE).chmod((staging / CONFIG_FILE).stat().st_mode)
        for name, text in (extra_files or {}).items():
            (staging / name).write_text(text, encoding="utf-8")
        check_weights(staging, read_config(staging))
        _swap_in(staging, target)
    except (OSError, SafetensorError) as error:
        raise HeadsError(
            f"{target}: cannot be written ({error}); what was there is as it was"
        ) from error
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _weights(heads: BlockwiseHeads) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in heads.state_dict().items() if value is not None]


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def require_replaceable(folder: str | os.PathLike[str]) -> None:
    """Raise HeadsError if saving to `folder` would remove something that is no heads' checkpoint.

    `save_heads` asks it too; whoever trains for hours first asks before.
    """
    target = Path(folder)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    try:
        model_type = read_json(target / CONFIG_FILE, "JSON").get("model_type")
    except HeadsError:
        model_type = None
    if model_type != MODEL_TYPE:
        raise HeadsError(
            f"{target}: found something other than heads; expected an empty or new folder, or "
            "older heads to replace: name another one, or remove it"
        )


def _swap_in(staging: Path, target: Path) -> None:
    """Put `staging` where `target` is; two renames, the old folder removed last."""
    if not target.exists():
        staging.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
    os.replace(target, old)
    try:
        staging.rename(target)
    except BaseException:  # an interrupt, too
        os.replace(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _refuse_pickles(folder: Path) -> None:
    """A pickle runs code when read, so heads never come from one, even if named by the user."""
    if folder.suffix in PICKLE_SUFFIXES and not folder.is_dir():
        raise HeadsError(
            f"{folder}: a pickled checkpoint; expected a folder with {CONFIG_FILE} and "
            f"{WEIGHTS_FILE}: convert it with safetensors in a place you trust"
        )
    if folder.is_dir() and not (folder / WEIGHTS_FILE).exists():
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise HeadsError(
                f"{folder / pickles[0]}: a pickled checkpoint, which runs code when read; "
                f"expected {WEIGHTS_FILE}: convert it with safetensors in a place you trust"
            )
