"""What heads for a large target cost to make: tokens, bytes and GPU-hours, by formula.

Floating-point operations are counted from the shapes, and divided by a rate. `measured` holds
the same formulae against what the small target's heads took on a CPU.

`python -m benchmarks.training_cost` prints the estimate that docs/distributed.md quotes.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.roofline import H100, LLAMA_70B, Model, step_seconds

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


# The heads that ship: 2,400 answer tokens a second on two cores (provenance.json), each of which
# multiplies at 192.4e9 operations a second (results/training_step.json).
SMALL = Model("SmolLM2 135M", 30, 576, 9, 3, 64, 1536, 49152)
SMALL_RECIPE = Recipe(4, 560, 8192, 440_209, 1.0, 2.8)
CORE_FLOPS = 192.4e9
MEASURED_TRAINING = 1200 * 1024 / 508  # answer tokens a second
MEASURED_STATES = 576.0  # tokens a second (results/name-to-heads.json), another job on a core
# One set of heads for a 70B target on H100s. Assumed: shares of the peak, and a batch.
LARGE_RECIPE = Recipe(4, 2048, 32_000, 100e6, 1.0, 3.0)
FORWARD_SHARE, TRAINING_SHARE, GENERATION_SHARE = 0.4, 0.3, 0.5
RANKS, BATCH, CONTEXT = 8, 256, 1024


def measured() -> dict[str, float]:
    """Share of two cores' rate that the small target's measured speeds come to by the formulae."""
    rate = 2 * CORE_FLOPS
    return {
        "training": MEASURED_TRAINING * training_flops(SMALL, SMALL_RECIPE) / rate,
        "states": MEASURED_STATES * target_flops(SMALL, 1) / rate,
    }


def estimate(model: Model, recipe: Recipe) -> dict[str, float]:
    """GPU-hours of each stage on H100s, and what is stored."""
    step = step_seconds(model, H100, BATCH, 1, CONTEXT, RANKS)
    read = recipe.answer_tokens * (1 + recipe.prompt_share)
    return {
        "answer_tokens": recipe.answer_tokens,
        "state_bytes": state_bytes(model, recipe),
        "generation_hours": RANKS * recipe.answer_tokens * step / BATCH / GENERATION_SHARE / 3600,
        "states_hours": hours(target_flops(model, read), FORWARD_SHARE * H100.flops),
        "training_hours": hours(
            recipe.epochs * recipe.answer_tokens * training_flops(model, recipe),
            TRAINING_SHARE * H100.flops,
        ),
    }


def main() -> None:
    """Print both."""
    for name, share in measured().items():
        print(f"{SMALL.name}, {name}: the measured speed is {share:.2f} of two cores' rate")
    print(f"training, operations a token: {training_flops(SMALL, SMALL_RECIPE):.3g} (small),")
    print(f"  {training_flops(LLAMA_70B, LARGE_RECIPE):.3g} (large)")
    for name, value in estimate(LLAMA_70B, LARGE_RECIPE).items():
        print(f"{LLAMA_70B.name}, {name}: {value:.3g}")


if __name__ == "__main__":
    main()
