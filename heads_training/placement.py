"""Where a target's weights lie: on one device, or over all GPUs here where one is too small.

A model that is spread takes ids on its embedding's device and gives states on its last layer's;
accelerate moves what lies between. It must not be moved as a whole.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

DeviceMap = str | dict[str, str | int]  # accelerate's: `auto`, or a device for each part
_ROOM = 0.8  # share of a GPU's free memory for weights; activations need the rest
_SLOW = {"cpu", "disk"}  # where accelerate puts what no GPU holds


def one_device() -> str:
    """The GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_map(folder: Path, dtype: str | torch.dtype) -> DeviceMap | None:
    """`auto` if the weights in `folder` need several of the GPUs here; None: `one_device`."""
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]
    return "auto" if needs_several(weight_bytes(folder, dtype), free) else None


def needs_several(weights: int, free: list[int]) -> bool:
    """Whether `weights` bytes should be spread over GPUs with `free` bytes each.

    What fits the first stays on it: each hop between GPUs costs time, and others may use them.
    """
    return len(free) > 1 and weights > _ROOM * free[0]


def weight_bytes(folder: Path, dtype: str | torch.dtype) -> int:
    """Bytes that the weights in `folder` take in `dtype`, or more.

    As they are stored, twice that in float32. Too many only spread what one GPU would have held.
    """
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return stored * (2 if dtype in (torch.float32, "float32") else 1)


def is_spread(model: Any) -> bool:
    """Whether accelerate has placed the model's parts."""
    return bool(getattr(model, "hf_device_map", None))


def report(model: Any, folder: Path) -> None:
    """Log where the parts of a model that is spread lie."""
    devices = [str(device) for device in model.hf_device_map.values()]
    logger.info("%s: spread over %s", folder.name, ", ".join(sorted(set(devices))))
    slow = sum(device in _SLOW for device in devices)
    if slow and torch.cuda.is_available():
        logger.warning(
            "%s: found %d of %d parts that no GPU here holds; from main memory or disk they run "
            "slowly: take a machine with more GPU memory",
            folder.name,
            slow,
            len(devices),
        )


def input_device(model: Any) -> torch.device:
    """The device that token ids must be on.

    An embedding kept in main memory or on disk is fetched for each pass, and its ids with it.
    """
    device: torch.device = model.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device
