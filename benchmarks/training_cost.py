"""What heads for a large target cost to make: tokens, bytes and GPU-hours, by formula.

Operations are counted from the shapes, and divided by a share of what the device multiplies.
`measured` says which shares the small target's heads came to on a CPU, from the files that
those measurements left; what is assumed for the large one is no more.

`python -m benchmarks.training_cost` prints both; docs/distributed.md quotes it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.roofline import H100, LLAMA_70B, Machine, Model, step_seconds
from heads_training.losses import SOFT_LABELS

_RESULTS = Path(__file__).parent / "results"
_STATE_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Recipe:
    """Heads, and the data they are trained on."""

    heads: int
    hidden_each: int  # hidden units of a head
    scored: int  # ids of the draft vocabulary
    answer_tokens: float
    prompt_share: float  # prompt tokens for each answer token
    epochs: float
    written_share: float = 1.0  # of the prompt tokens, by the target itself; 0: all are given
    validation: float = 0.05  # share of the answers that no step trains on
    head_decay: float = 0.7  # share of the rows that a head sees, relative to the one before


def target_flops(model: Model, tokens: float) -> float:
    """Operations of forward passes over `tokens`, attention over the context left out."""
    return 2 * tokens * model.layers * model.layer_weights


def state_bytes(model: Model, recipe: Recipe) -> float:
    """Bytes of cached hidden states: one for each answer token."""
    return recipe.answer_tokens * model.hidden * _STATE_BYTES


def training_flops(model: Model, recipe: Recipe) -> float:
    """Operations for one answer token: heads forward and backward, LM head and its gradient.

    The LM head's rows are frozen, so it has two products where a trained matrix has three.
    """
    shares = sum(recipe.head_decay**head for head in range(recipe.heads))
    input_layer = 2 * model.hidden * recipe.heads * recipe.hidden_each
    output_layer = shares * recipe.heads * recipe.hidden_each * model.hidden
    scored = shares * model.hidden * recipe.scored
    return 6 * (input_layer + output_layer) + 4 * scored


def hours(flops: float, rate: float) -> float:
    """Hours of one device that does `rate` operations a second."""
    return flops / rate / 3600


def label_bytes(recipe: Recipe) -> float:
    """Bytes of labels that each process holds: ids int64, soft labels int32 and float16."""
    row = 2 * 8 + 2 * 8 * recipe.heads + (4 + 2) * SOFT_LABELS
    ids = 4 * (1 + recipe.prompt_share)
    return recipe.answer_tokens * (row + ids)


def soft_label_flops(model: Model, recipe: Recipe) -> float:
    """Operations of one process's soft labels: the scored ids' logits at every row."""
    return 2 * recipe.answer_tokens * model.hidden * recipe.scored


def random_reads(recipe: Recipe) -> float:
    """States that the steps read, each from a place of its own, all workers together."""
    return recipe.epochs * (1 - recipe.validation) * recipe.answer_tokens


def writing_seconds(
    model: Model, machine: Machine, tokens: float, batch: int, context: int, ranks: int = 1
) -> float:
    """Seconds of one device to write `tokens`, a step of `batch` requests at a time."""
    return ranks * tokens * step_seconds(model, machine, batch, 1, context, ranks) / batch


def gpus_holding(model: Model, machine: Machine) -> int:
    """How many devices the whole model is spread over, a fifth of each left free."""
    weights = model.layers * model.layer_weights + 2 * model.lm_head_weights
    return math.ceil(weights * model.bytes_each / (0.8 * machine.memory))


# The recipe smollm2-135m-cpu, which both measurements below were made with.
SMALL = Model("SmolLM2 135M", 30, 576, 9, 3, 64, 1536, 49152)
SMALL_RECIPE = Recipe(4, 560, 8192, 440_209, 1.0, 2.8)
SMALL_STEP, SMALL_BATCH, SMALL_CORES = 1024, 128, 2  # rows a step; requests at once
# One set of heads for a 70B target on H100s. Assumed: a batch, and shares of the peak, none above
# what was measured.
LARGE_RECIPE = Recipe(4, 2048, 32_000, 100e6, 1.0, 3.0)
FORWARD_SHARE, TRAINING_SHARE, GENERATION_SHARE = 0.3, 0.2, 0.2
RANKS, BATCH, CONTEXT, WORKERS = 8, 256, 1024, 8
READ_SECONDS = {"a local disk": 1e-4, "network storage": 1e-3}  # a read of one state; assumed


def read_result(name: str) -> Any:
    """A file of benchmarks/results."""
    return json.loads((_RESULTS / name).read_text(encoding="utf-8"))


def measured() -> dict[str, tuple[float, float]]:
    """Tokens a second of each measurement, and the share of the cores' rate they come to.

    `training_step.json` is of one core and of the loop alone; `name-to-heads.json` of two, with
    another job on one, validation, and the engine's last requests running alone.
    """
    alone, whole = read_result("training_step.json"), read_result("name-to-heads.json")
    core = 1e9 * alone["bfloat16"]["machine_gflops"]
    cores = SMALL_CORES * core
    flops = training_flops(SMALL, SMALL_RECIPE)
    step = alone["bfloat16"]["training_tokens_per_s"]
    last = whole["training"][-1]
    run = last["step"] * SMALL_STEP / last["seconds"]
    states = whole["hidden_states"]["tokens_per_second"]
    return {
        "training, steps alone": (step, step * flops / (alone["threads"] * core)),
        "training, whole run": (run, run * flops / cores),
        "states": (states, states * target_flops(SMALL, 1) / cores),
        **measured_generation(whole, cores),
    }


def measured_generation(whole: dict[str, Any], cores: float) -> dict[str, tuple[float, float]]:
    """As `measured`: with the prompts, nearly all of which the target wrote; and without them."""
    made = whole["generation"]
    seconds = made["seconds_from_start_to_answers"] - made["seconds_of_them_to_start_the_engine"]
    answers, everything = made["answer_tokens"], whole["hidden_states"]["tokens"]
    prompts = everything - answers
    context = round((prompts + answers / 2) / whole["answers"]["answers"])
    bandwidth = 1e9 * SMALL_CORES * read_result("roofline-anchor.json")["gigabytes_per_s"]
    machine = Machine("cores", cores, bandwidth)
    each = writing_seconds(SMALL, machine, 1, SMALL_BATCH, context)
    read = target_flops(SMALL, prompts) / cores
    return {
        "generation": (everything / seconds, (everything * each + read) / seconds),
        "generation, answers alone": (answers / seconds, answers * each / seconds),
    }


def estimate(model: Model, recipe: Recipe) -> dict[str, float]:
    """GPU-hours of each stage on H100s, and what is stored and read."""
    prompts = recipe.answer_tokens * recipe.prompt_share
    rate = GENERATION_SHARE * H100.flops

    def written(tokens: float) -> float:
        seconds = writing_seconds(model, H100, tokens, BATCH, CONTEXT, RANKS)
        return seconds / GENERATION_SHARE / 3600

    states = hours(target_flops(model, recipe.answer_tokens + prompts), FORWARD_SHARE * H100.flops)
    processes = WORKERS + 1  # and the one that started them
    soft = hours(soft_label_flops(model, recipe), FORWARD_SHARE * H100.flops)
    steps = recipe.epochs * recipe.answer_tokens * training_flops(model, recipe)
    return {
        "answers, GPU-hours": written(recipe.answer_tokens),
        "prompts written, GPU-hours": written(prompts * recipe.written_share),
        "prompts read, GPU-hours": hours(target_flops(model, prompts), rate),
        "states, hours": states,
        "states, GPU-hours held": states * gpus_holding(model, H100),
        "soft labels, GPU-hours": processes * soft,
        "training, GPU-hours": hours(steps, TRAINING_SHARE * H100.flops),
        "states, bytes": state_bytes(model, recipe),
        "labels, bytes a process": label_bytes(recipe),
        "read in order, bytes": processes * state_bytes(model, recipe),
        "read at random, bytes": random_reads(recipe) * model.hidden * _STATE_BYTES,
        **{
            f"read at random from {name}, hours": random_reads(recipe) * seconds / WORKERS / 3600
            for name, seconds in READ_SECONDS.items()
        },
    }


def lines() -> list[str]:
    """Both, as text."""
    found = [f"{SMALL.name}: tokens a second, and the share of the cores' rate"]
    for name, (speed, share) in measured().items():
        found.append(f"  {name:42} {speed:8.1f} {share:8.3f}")
    found.append(f"{LLAMA_70B.name}: {LARGE_RECIPE.answer_tokens:.3g} answer tokens")
    for name, value in estimate(LLAMA_70B, LARGE_RECIPE).items():
        found.append(f"  {name:42} {value:8.3g}")
    return found


def main() -> None:
    """Print both."""
    print("\n".join(lines()))


if __name__ == "__main__":
    main()
