"""Keeps the hidden states that the heads are given inside an engine process, and where from.

Needs the `plugin` stand-in of `stand_ins` to be installed, in mode `heads`: it notes the token row
of each request, and lets the heads draft.

Shape suffixes: B requests that sampled in one step, N rows kept in all, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Captured:
    """A request's tokens so far, the one just sampled included, and the state it came from."""

    tokens: list[int]
    state_D: Any  # a tensor of the engine's dtype


@contextmanager
def kept_in(path: Path) -> Iterator[None]:
    """Write to `path` (safetensors) every state that the heads are given until the end."""
    import torch
    from safetensors.torch import save_file

    from integration_tests.harness.stand_ins import SCRIPT
    from vllm_bpd.model import BlockwiseHeadsModel

    rows: list[list[int]] = []
    states: list[Any] = []
    original = BlockwiseHeadsModel.forward

    def forward(self: Any, hidden_BD: Any, sampled_B: Any) -> Any:
        if SCRIPT.runner is not None:
            assert len(SCRIPT.rows) == len(hidden_BD)
            rows.extend(SCRIPT.rows)
            states.append(hidden_BD.clone())
        return original(self, hidden_BD, sampled_B)

    patched: Any = BlockwiseHeadsModel
    patched.forward = forward
    try:
        yield
    finally:
        patched.forward = original
    tensors = {
        "states": torch.cat(states),
        "lengths": torch.tensor([len(row) for row in rows]),
        "tokens": torch.tensor([token for row in rows for token in row]),
    }
    save_file(tensors, path)


def read(path: Path) -> list[Captured]:
    """What `kept_in` wrote."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    rows = tensors["tokens"].split(tensors["lengths"].tolist())
    return [
        Captured(row.tolist(), state_D)
        for row, state_D in zip(rows, tensors["states"], strict=True)
    ]
