"""Which target a checkpoint is: read from its files, without loading the model. No vLLM.

The hash covers 16 rows of the LM head, as float32, so that it does not depend on the dtype the
rows are stored in, and a fine-tuned or re-quantised LM head is told from the original.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_bpd.config import TargetFingerprint
from vllm_bpd.errors import HeadsError, read_json, shown

_HASHED_ROWS = 16
# Names that architectures give an LM head of its own; without one it is tied to the embedding.
_LM_HEAD_MODULES = ("lm_head", "embed_out", "output", "output_layer")
_EMBEDDING_MODULES = ("embed_tokens", "wte", "embed_in", "embeddings", "word_embeddings")
# Others need a scale to mean anything: such a matrix is quantised.
_PLAIN_DTYPES = {"F64", "F32", "F16", "BF16"}


def hash_rows(rows: Tensor) -> str:
    """sha256 (hex, 64 characters) over the float32 bytes of `rows` [16, D]."""
    return hashlib.sha256(rows.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()


def hashed_row_ids(vocab_size: int) -> list[int]:
    """The row ids that are hashed: evenly spaced, first and last real row included."""
    count = min(_HASHED_ROWS, vocab_size)
    return [i * (vocab_size - 1) // max(count - 1, 1) for i in range(count)]


def read_fingerprint(folder: Path, weights: Path | None = None) -> TargetFingerprint:
    """Fingerprint of the target checkpoint in `folder`; its hash is None where no plain LM head
    is found (a quantised one, or weights that are not safetensors, or not there yet).

    `weights` is the folder of its weights, if that is another one.

    Raises HeadsError if `config.json` is absent or lacks what every text model has.
    """
    path = folder / "config.json"
    values = read_json(path, "a target's config")
    text = values.get("text_config") or values
    architectures = values.get("architectures") or [None]
    for name, value, kind in (("text_config", text, dict), ("architectures", architectures, list)):
        if not isinstance(value, kind):
            raise HeadsError(f"{path}: {name}: found {shown(value)}; this is no target's config")
    found = {
        "architecture": architectures[0],
        "num_hidden_layers": text.get("num_hidden_layers", text.get("n_layer")),
        "hidden_size": text.get("hidden_size", text.get("n_embd")),
        "vocab_size": text.get("vocab_size", values.get("vocab_size")),
    }
    for name, value in found.items():
        if value is None:
            raise HeadsError(f"{path}: {name}: missing; heads can only belong to a known target")
        if not isinstance(value, str if name == "architecture" else int):
            raise HeadsError(f"{path}: {name}: found {shown(value)}; this is no target's config")
    tied = text.get("tie_word_embeddings", values.get("tie_word_embeddings"))
    digest = lm_head_hash(weights or folder, found["vocab_size"], found["hidden_size"], tied)
    return TargetFingerprint(**found, lm_head_hash=digest)


def lm_head_hash(
    folder: Path, vocab_size: int, hidden_size: int, tied: bool | None = None
) -> str | None:
    """`hash_rows` of the LM head stored in `folder`, or None if there is no plain one.

    `tied` is what the target's config says of its embedding, None if nothing. An LM head that is
    stored wins, as it does in transformers and in vLLM.
    """
    stored = _stored(folder, _LM_HEAD_MODULES)
    if not stored and tied is not False:
        stored = _stored(folder, _EMBEDDING_MODULES)
    for path, name in stored:
        rows = _read_rows(path, name, vocab_size, hidden_size)
        if rows is not None:
            return hash_rows(rows)
    return None


def stored_embedding(folder: Path, vocab_size: int, hidden_size: int) -> tuple[Path, str] | None:
    """File and name of the embedding stored in `folder`, or None if there is no plain one."""
    for path, name in _stored(folder, _EMBEDDING_MODULES):
        if _read_rows(path, name, vocab_size, hidden_size) is not None:
            return path, name
    return None


def stored_matrix(folder: Path, name: str, shape: tuple[int, ...]) -> Path | None:
    """The file in `folder` with the plain matrix `name` of exactly this shape, or None."""
    for path, stored in _all_tensors(folder):
        if stored != name:
            continue
        with contextlib.suppress(SafetensorError, OSError), safe_open(path, "pt") as file:
            rows = file.get_slice(name)
            if tuple(rows.get_shape()) == shape and rows.get_dtype() in _PLAIN_DTYPES:
                return path
    return None


def stores_lm_head(folder: Path) -> bool:
    """Whether `folder` has an LM head of its own, plain or quantised, under any known name."""
    return bool(_stored(folder, _LM_HEAD_MODULES))


def _stored(folder: Path, modules: tuple[str, ...]) -> list[tuple[Path, str]]:
    """File and name of the tensors of these modules, plain or quantised, outside the layers."""
    found = []
    for path, name in _all_tensors(folder):
        *outer, module, _ = ["", *name.split(".")] if "." in name else ["", "", name]
        if module in modules and not any(part.isdigit() for part in outer):
            found.append((path, name))
    return sorted(found, key=lambda item: item[1])


def _all_tensors(folder: Path) -> Iterator[tuple[Path, str]]:
    """File and name of every tensor in `folder`; none of a file that cannot be read."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with contextlib.suppress(HeadsError, KeyError, TypeError, AttributeError):
            weight_map = read_json(index, "JSON")["weight_map"]
            yield from ((folder / file, name) for name, file in weight_map.items())
        return
    for path in sorted(folder.glob("*.safetensors")):
        with contextlib.suppress(SafetensorError, OSError), safe_open(path, "pt") as file:
            yield from ((path, name) for name in list(file.keys()))


def _read_rows(path: Path, name: str, vocab_size: int, hidden_size: int) -> Tensor | None:
    """The rows that are hashed, or None if this is not a plain matrix over the vocabulary."""
    try:
        with safe_open(path, framework="pt") as file:
            rows = file.get_slice(name)
            shape: list[int] = rows.get_shape()
            # More rows than the vocabulary: padded; the rows hashed are real ones.
            fits = len(shape) == 2 and shape[0] >= vocab_size and shape[1] == hidden_size
            if not (fits and name.endswith(".weight") and rows.get_dtype() in _PLAIN_DTYPES):
                return None
            return torch.cat([rows[i : i + 1] for i in hashed_row_ids(vocab_size)])
    except (SafetensorError, OSError):
        return None


def explain_mismatch(heads: TargetFingerprint, target: TargetFingerprint) -> str | None:
    """One line saying how the heads' target differs from this one, or None if it is the same."""
    for name in ("hidden_size", "vocab_size", "num_hidden_layers", "architecture"):
        ours, theirs = getattr(heads, name), getattr(target, name)
        if ours != theirs:
            return f"{name}: the heads were trained for {ours}, this target has {theirs}"
    if None not in (heads.lm_head_hash, target.lm_head_hash) and (
        heads.lm_head_hash != target.lm_head_hash
    ):
        return (
            f"lm_head_hash: the heads were trained for {str(heads.lm_head_hash)[:12]}, this "
            f"target has {str(target.lm_head_hash)[:12]} (another model of the same shape)"
        )
    return None
