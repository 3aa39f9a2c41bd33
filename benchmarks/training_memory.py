"""Training memory against sequence length: bytes alive at once in one step, counted exactly.

Heads in the shapes of those that ship, their loss and its gradients, for one text of so many
tokens; with logits a chunk of rows at a time, as trained, and with those of all rows together.
What the target itself holds in finetune mode comes on top, in proportion to the tokens.

Shape suffixes: R rows, S labels a row, V scored ids, D hidden size.
"""

from __future__ import annotations

import argparse
import json
import weakref
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heads_training.objectives import FrozenObjective
from heads_training.train_config import TrainConfig
from vllm_bpd.arguments import output_file, run_command
from vllm_bpd.config import HeadsConfig, TargetFingerprint
from vllm_bpd.heads import BlockwiseHeads

HIDDEN, HEADS, UNITS, SCORED = 576, 2, 1680, 8192
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
CHUNK = TrainConfig.logits_chunk
_LABELS = 17  # a row: the target's token and its 16 most probable


class CountedMemory(TorchDispatchMode):
    """Counts bytes of storages made since it began, alive at once, and the largest of them."""

    def __init__(self) -> None:
        """Nothing is counted yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive, self.peak, self.largest = 0, 0, 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _is_tensor(t)}
        made = func(*args, **(kwargs or {}))
        for tensor in filter(_is_tensor, tree_leaves(made)):
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
                self.peak = max(self.peak, self.alive)
        return made

    def _freed(self, place: int, size: int) -> None:
        self._seen.discard(place)
        self.alive -= size


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def main() -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_memory", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--output", type=output_file, help="JSON file")
    arguments = parser.parse_args()
    found = {}
    for length in LENGTHS:
        found[str(length)] = {
            "chunked_mib": step_bytes(length, CHUNK) / 2**20,
            "whole_mib": step_bytes(length, length) / 2**20,
        }
        print(length, found[str(length)], flush=True)
    if arguments.output:
        made = {
            "command": "python -m benchmarks.training_memory",
            "versions": {"torch": version("torch")},
            "chunk": CHUNK,
            "by_length": found,
        }
        arguments.output.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def step_bytes(length: int, chunk: int) -> int:
    """The most bytes alive in a step over one text of `length` tokens, weights not among them."""
    torch.manual_seed(0)
    fingerprint = TargetFingerprint("Made", 1, HIDDEN, SCORED)
    heads = BlockwiseHeads(HeadsConfig(HEADS, UNITS, fingerprint, conditioning="sampled_token")).to(
        torch.bfloat16
    )
    matrix_VD = torch.randn(SCORED, HIDDEN, dtype=torch.bfloat16)
    objective = FrozenObjective(heads, matrix_VD, matrix_VD, chunk)
    hidden_RD = torch.randn(length, HIDDEN, dtype=torch.bfloat16)
    ids_RS = torch.randint(0, SCORED, (length, _LABELS))
    weights_RS = torch.full((length, _LABELS), 1 / _LABELS)
    targets = dict.fromkeys(range(HEADS), (ids_RS, weights_RS))
    with CountedMemory() as memory:
        objective(hidden_RD, ids_RS[:, 0], targets)["loss"].backward()
    return int(memory.peak)


if __name__ == "__main__":
    run_command(main)
