"""A training run on disk, as safetensors: heads, optimiser moments and step, written whole.

Pickles, torch's own format among them, are never read: a work folder may come from anyone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_bpd.errors import HeadsError

_HEADS, _OPTIMIZER = "heads.", "optimizer."


def save_state(
    path: Path,
    step: int,
    heads: nn.Module,
    optimizer: torch.optim.Optimizer,
    made_with: dict[str, Any],
) -> None:
    """Write the state whole or not at all; `made_with` is plain data that `load_state` compares."""
    tensors: dict[str, Tensor] = {
        f"{_HEADS}{name}": value.contiguous() for name, value in heads.state_dict().items()
    }
    for index, moments in optimizer.state_dict()["state"].items():
        for name, value in moments.items():
            tensors[f"{_OPTIMIZER}{index}.{name}"] = value.contiguous()
    partial = path.with_suffix(".partial")
    metadata = {"step": str(step), "made_with": json.dumps(made_with)}
    save_file(tensors, partial, metadata=metadata)
    partial.replace(path)


def load_state(
    path: Path, heads: nn.Module, optimizer: torch.optim.Optimizer, made_with: dict[str, Any]
) -> int:
    """Restore what `save_state` wrote, exactly; returns the step.

    Raises HeadsError, changing nothing, if the file is damaged or was made with other options.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            step, found = int(metadata["step"]), json.loads(metadata["made_with"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HeadsError(f"{path}: not a training state ({reason}); delete it") from None
    expected = json.loads(json.dumps(made_with))  # tuples come back as lists
    differing = [name for name in expected if found.get(name) != expected[name]]
    if differing:
        name = differing[0]
        raise HeadsError(
            f"{path}: {name}: found {found.get(name)!r}, this run has {expected[name]!r}; "
            "give the same options and answers to go on, or delete the file to start anew"
        )
    heads.load_state_dict(
        {n.removeprefix(_HEADS): t for n, t in tensors.items() if n.startswith(_HEADS)}
    )
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith(_OPTIMIZER):
            index, key = name.removeprefix(_OPTIMIZER).split(".", 1)
            moments.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    return step
