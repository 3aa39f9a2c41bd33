"""Which target a checkpoint is: read from its files, without loading the model. No vLLM.

The hash covers 16 rows of the LM head, as float32, so that it does not depend on the dtype the
rows are stored in, and a fine-tuned or re-quantised LM head is told from the original.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_bpd.config import TargetFingerprint
from vllm_bpd.errors import HeadsError

_HASHED_ROWS = 16
# Names that architectures give an LM head of its own; without one it is tied to the embedding.
_LM_HEAD_NAMES = ("lm_head.weight", "embed_out.weight", "output.weight", "output_layer.weight")
_EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "embeddings.weight")


def hash_rows(rows: Tensor) -> str:
    """sha256 (hex, 64 characters) over the float32 bytes of `rows` [16, D]."""
    return hashlib.sha256(rows.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()


def hashed_row_ids(vocab_size: int) -> list[int]:
    """The row ids that are hashed: evenly spaced, first and last real row included."""
    count = min(_HASHED_ROWS, vocab_size)
    return [i * (vocab_size - 1) // max(count - 1, 1) for i in range(count)]


def read_fingerprint(folder: Path) -> TargetFingerprint:
    """Fingerprint of the target checkpoint in `folder`; its hash is None where no plain LM head
    is found (a quantised one, or weights that are not safetensors).

    Raises HeadsError if `config.json` is absent or lacks what every text model has.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise HeadsError(f"{path}: not readable as a target's config ({error})") from None
    text = values.get("text_config") or values
    architectures = values.get("architectures") or [None]
    found = {
        "architecture": architectures[0],
        "num_hidden_layers": text.get("num_hidden_layers", text.get("n_layer")),
        "hidden_size": text.get("hidden_size", text.get("n_embd")),
        "vocab_size": text.get("vocab_size", values.get("vocab_size")),
    }
    for name, value in found.items():
        if value is None:
            raise HeadsError(f"{path}: {name}: missing; heads can only belong to a known target")
    return TargetFingerprint(
        **found, lm_head_hash=lm_head_hash(folder, found["vocab_size"], found["hidden_size"])
    )


def lm_head_hash(folder: Path, vocab_size: int, hidden_size: int) -> str | None:
    """`hash_rows` of the LM head stored in `folder`, or None if there is no plain one."""
    for names in (_LM_HEAD_NAMES, _EMBEDDING_NAMES):
        for path in _weight_files(folder, names):
            rows = _read_rows(path, names, vocab_size, hidden_size)
            if rows is not None:
                return hash_rows(rows)
    return None


def _weight_files(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """The safetensors files that may hold a tensor of these names."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return sorted({folder / file for name, file in weight_map.items() if name.endswith(names)})


def _read_rows(
    path: Path, names: tuple[str, ...], vocab_size: int, hidden_size: int
) -> Tensor | None:
    try:
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                if not name.endswith(names):
                    continue
                shape: list[Any] = file.get_slice(name).get_shape()
                # More rows than the vocabulary: padded; the rows hashed are real ones.
                if len(shape) == 2 and shape[0] >= vocab_size and shape[1] == hidden_size:
                    tensor: Tensor = file.get_tensor(name)
                    return tensor[hashed_row_ids(vocab_size)]
    except (SafetensorError, OSError):
        return None
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
