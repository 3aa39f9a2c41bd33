"""How well a training step of the heads uses the machine.

Two figures for each dtype, both beside this machine's own rate for the same matrix products,
measured alternately in the same run:

- `products`: the step's LM-head products (logits, and their gradient), timed inside the step.
- `loss`: the whole of `chunked_loss`, soft-max and labels included.

On a CPU their seconds are CPU seconds, so another job does not count, and rates are of one core.
And the training speed of a whole step, in answer tokens a second. Data and weights are random, in
the shapes of SmolLM2-135M's heads by default; only ratios mean anything on another machine.

Shape suffixes: R rows, V scored ids, D hidden size, S labels a row.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heads_training.dataset import Texts, label_text
from heads_training.losses import SoftLabels, chunked_loss
from heads_training.target import TargetRows
from heads_training.train import TrainConfig, TrainingData, make_trainer
from vllm_bpd.config import TargetFingerprint

_SOFT = 16  # soft labels a row
_HEADS = 4
_WANTED = 0.6  # of the machine's own rate
_OUTPUT = Path(__file__).parent / "results" / "training_step.json"


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_step", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--rows", type=int, default=1024, help="answer tokens a step")
    parser.add_argument(
        "--chunk", type=int, default=TrainConfig().logits_chunk, help="rows at once"
    )
    parser.add_argument("--vocab", type=int, default=8192, help="ids that heads score")
    parser.add_argument("--width", type=int, default=576, help="the target's hidden size")
    parser.add_argument("--hidden", type=int, default=560, help="hidden units a head")
    parser.add_argument("--rounds", type=int, default=15, help="alternating repetitions")
    parser.add_argument("--steps", type=int, default=15, help="whole training steps")
    parser.add_argument("--output", type=Path, default=_OUTPUT, help="JSON file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        "shapes": {name: getattr(args, name) for name in ("rows", "chunk", "vocab", "width")},
        "wanted_share": _WANTED,
    }
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        result[name] = {**products(args, dtype, device), **training(args, dtype)}
        print(json.dumps({name: result[name]}, indent=2))
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def products(args: argparse.Namespace, dtype: torch.dtype, device: str) -> dict[str, float]:
    """GFLOP/s of the LM-head products and of the loss, and their share of the machine's."""
    generator = torch.Generator().manual_seed(0)
    states_RD = torch.randn(args.rows, args.width, generator=generator).to(device, dtype)
    head_VD = torch.randn(args.vocab, args.width, generator=generator).to(device, dtype)
    slope_RV = torch.randn(args.chunk, args.vocab, generator=generator).to(device, dtype)
    ids_RS = torch.randint(0, args.vocab, (args.rows, _SOFT + 1), generator=generator).to(device)
    weights_RS = torch.full(ids_RS.shape, 1 / args.rows, device=device)
    states_RD.requires_grad_()

    def alone() -> None:
        with torch.no_grad():
            for rows_RD in states_RD.split(args.chunk):
                rows_RD @ head_VD.T
                slope_RV[: len(rows_RD)] @ head_VD

    def loss() -> None:
        chunked_loss((states_RD, ids_RS, weights_RS), (head_VD,), args.chunk).backward()

    times: dict[str, list[float]] = {"machine": [], "loss": [], "products": []}
    for _ in range(args.rounds + 2):
        times["machine"].append(timed(alone))
        times["loss"].append(timed(loss))
        seconds_inside, count = product_seconds(loss, args.vocab)
        times["products"].append(seconds_inside)
        assert count == 2 * len(states_RD.split(args.chunk)), count  # none twice, none left out
    seconds = {name: statistics.median(found[2:]) for name, found in times.items()}  # warm
    work = 2 * 2 * args.rows * args.vocab * args.width  # multiply and add, two products
    rates = {f"{name}_gflops": round(work / took / 1e9, 1) for name, took in seconds.items()}
    shares = {
        f"{name}_share": round(seconds["machine"] / seconds[name], 3)
        for name in ("products", "loss")
    }
    return {**rates, **shares}


def now() -> float:
    """Seconds: of this process's work on a CPU, of the clock once a GPU has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def timed(function: Callable[[], None]) -> float:
    """Seconds that `function` takes."""
    begin = now()
    function()
    return now() - begin


class _Products(TorchDispatchMode):
    """Times the matrix products over the vocabulary."""

    def __init__(self, vocab: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab, self.seconds, self.count = vocab, 0.0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.mm.default or not any(self.vocab in t.shape for t in args):
            return func(*args, **(kwargs or {}))
        begin = now()
        made = func(*args, **(kwargs or {}))
        self.seconds += now() - begin
        self.count += 1
        return made


def product_seconds(function: Callable[[], None], vocab: int) -> tuple[float, int]:
    """Seconds that `function` spends in matrix products over the vocabulary, and their number."""
    with _Products(vocab) as products:
        function()
    return products.seconds, products.count


def training(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, float]:
    """Answer tokens a second of whole steps, without validation or saving."""
    data = made_data(args)
    config = TrainConfig(
        num_draft_heads=_HEADS,
        head_hidden_size=args.hidden,
        steps=args.steps + 1,
        batch_size=args.rows,
        logits_chunk=args.chunk,
        validate_every=args.steps + 1,
        autocast=dtype == torch.bfloat16,
    )
    with tempfile.TemporaryDirectory() as work:
        trainer = make_trainer(config, data, Path(work))
        trainer.validate = lambda _: 1.0
        begin = time.perf_counter()
        trainer.run()
        seconds = time.perf_counter() - begin
    return {"training_tokens_per_s": round(config.steps * args.rows / seconds, 1)}


def made_data(args: argparse.Namespace) -> TrainingData:
    """Random states and labels in the shapes asked for."""
    rows = args.rows * (args.steps + 1)
    ids_T = torch.randint(0, args.vocab, (rows + 1,))
    sampled_T, next_TK = label_text(ids_T[:1], ids_T[1:], _HEADS)
    texts = Texts(
        [torch.randn(rows, args.width, dtype=torch.bfloat16)],
        sampled_T,
        next_TK,
        torch.zeros(rows, dtype=torch.int64),
        [b""],
        ["random"],
        [False],
        [ids_T.int()],
        torch.tensor([rows]),
        torch.tensor([False]),
    )
    matrix_VD: Tensor = torch.randn(args.vocab, args.width) / args.width**0.5
    target = TargetRows(TargetFingerprint("Made", 1, args.width, args.vocab), matrix_VD, matrix_VD)
    soft = SoftLabels(
        torch.randint(0, args.vocab, (rows, _SOFT)).int(),
        torch.full((rows, _SOFT), 1 / _SOFT, dtype=torch.float16),
    )
    rows_T = torch.arange(rows)
    return TrainingData(texts, rows_T, rows_T, None, next_TK, soft, target, 1.0)


if __name__ == "__main__":
    main()
