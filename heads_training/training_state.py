"""A training run on disk, as safetensors: weights, optimiser moments and schedule, written whole.

Pickles, torch's own format among them, are never read or written: a work folder may come from
anyone, and a pickle runs code when read. `transformers.Trainer` would write `optimizer.pt`,
`scheduler.pt`, `rng_state.pth` and `training_args.bin`; here tensors go to safetensors, plain
values to JSON, and no random state is kept, since every step is seeded by its own number.

Tensors are gathered whole by `torch.distributed.checkpoint.state_dict`, keyed by parameter name,
whether the module is plain, in DDP or sharded by FSDP: a run can go on with another number of
processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from vllm_bpd.errors import HeadsError

STATE_FILE = "state.safetensors"
_MODEL, _OPTIMIZER = "model.", "optimizer."


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, whole, on the CPU. Every process has to call it.

    A parameter with two names (a tied LM head) is kept once, under the first.
    """
    # Not offloaded by torch, which would leave all but the first process without any.
    weights: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True)
    )
    names = {_plain(name) for name, _ in model.named_parameters()}
    return {
        name: value.detach().cpu().contiguous() for name, value in weights.items() if name in names
    }


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments by name, whole, on the CPU. Every process has to call it."""
    options = StateDictOptions(full_state_dict=True)
    state = {f"{_MODEL}{name}": value for name, value in whole_weights(model).items()}
    moments: Any = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    for name, values in moments.items():
        for key, value in values.items():
            state[f"{_OPTIMIZER}{name}:{key}"] = value.detach().cpu().contiguous()
    return state


def _plain(name: str) -> str:
    """A parameter's name without what DDP or FSDP wrap around it."""
    return name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")


def save_state(
    folder: Path, tensors: dict[str, Tensor], values: dict[str, Any], made_with: dict[str, Any]
) -> None:
    """Write `gather_state`'s tensors; `values` and `made_with` are plain data."""
    metadata = {"values": json.dumps(values), "made_with": json.dumps(made_with)}
    save_file(tensors, folder / STATE_FILE, metadata=metadata)


def read_state(folder: Path, made_with: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the values that `save_state` wrote.

    Raises HeadsError if the file is damaged or was made with other options or data.
    """
    path = folder / STATE_FILE
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            values, found = (json.loads(metadata[name]) for name in ("values", "made_with"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HeadsError(f"{path}: not a training state ({reason}); delete {folder}") from None
    expected = json.loads(json.dumps(made_with))  # tuples come back as lists
    for name, value in expected.items():
        if found.get(name) != value:
            raise HeadsError(
                f"{path}: {name}: found {found.get(name)!r}, this run has {value!r}; give the same "
                f"options and answers to go on, or delete {folder} to start anew"
            )
    return tensors, values


def load_weights(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put the weights of `read_state` into `model`, exactly."""
    weights: dict[str, Any] = {
        n.removeprefix(_MODEL): t for n, t in tensors.items() if n.startswith(_MODEL)
    }
    # Not strict: a tied parameter's second name is absent.
    set_model_state_dict(
        model, weights, options=StateDictOptions(full_state_dict=True, strict=False)
    )


def heads_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The heads' weights among the tensors of `read_state`, by their own names."""
    prefix = f"{_MODEL}heads."
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def load_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Put the moments of `read_state` into `optimizer`, exactly."""
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    moments: dict[str, Any] = {}
    for name, value in tensors.items():
        if name.startswith(_OPTIMIZER):
            parameter, key = name.removeprefix(_OPTIMIZER).rsplit(":", 1)
            moments.setdefault(parameter, {})[key] = value
    set_optimizer_state_dict(
        model, optimizer, {"state": moments, "param_groups": state["param_groups"]}, options=options
    )
