"""What `bpd` gains when verification turns from memory-bound to compute-bound: a plan on paper.

A step reads the weights and the KV cache once, whatever the number of tokens it verifies, and
multiplies for each of them. While reading is what takes the time, k tokens cost about what one
does; past the point where multiplying takes longer, each costs its own time. Tensor parallelism
divides both, and adds two all-reduces a layer. For a layer's matrices, its attention and the LM
head apart, a step takes the longer of the two times: no overlap between them, perfect overlap
within.

`python -m benchmarks.roofline` writes docs/roofline.svg and benchmarks/results/roofline.json.
`benchmarks.roofline_anchor` holds the model against a measurement.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_RESULTS = Path(__file__).parent / "results" / "roofline.json"
_PICTURE = Path(__file__).parents[1] / "docs" / "roofline.svg"


@dataclass(frozen=True)
class Model:
    """A decoder: what of it is read and multiplied."""

    name: str
    layers: int
    hidden: int  # d
    heads: int  # of attention, for queries
    kv_heads: int
    head_dim: int
    intermediate: int  # of the gated MLP
    vocab: int
    bytes_each: int = 2  # of a weight or a cached number

    @property
    def layer_weights(self) -> int:
        """Numbers in one layer's matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def lm_head_weights(self) -> int:
        """Numbers in the LM head."""
        return self.hidden * self.vocab

    @property
    def kv_numbers(self) -> int:
        """Numbers cached for one token in one layer."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Machine:
    """One accelerator, and how it is joined to the others."""

    name: str
    flops: float  # a second, dense, in the weights' dtype
    bandwidth: float  # bytes a second from memory
    memory: float = float("inf")  # bytes
    link: float = float("inf")  # bytes a second to the others, one way
    hop: float = 0.0  # seconds an all-reduce takes at least
    overhead: float = 0.0  # seconds a step takes beside all this


@dataclass(frozen=True)
class Heads:
    """Blockwise heads: two matrices for all, and the rows of the LM head that they score."""

    count: int  # k - 1
    joint: int  # hidden units of all heads together
    scored: int  # ids

    def weights(self, model: Model) -> int:
        """Numbers read to draft once."""
        return self.joint * model.hidden * (2 + self.count) + self.scored * model.hidden

    def products(self, model: Model) -> int:
        """Multiplications a drafting request costs: the LM head's rows are scored for each head."""
        own = self.joint * model.hidden * (2 + self.count)  # input: state and embedding
        return own + self.count * self.scored * model.hidden


def step_seconds(
    model: Model, machine: Machine, batch: int, block: int, context: int, ranks: int = 1
) -> float:
    """Seconds of one forward: `batch` requests of `block` tokens each, `context` tokens cached."""
    tokens = batch * block

    def longer(numbers_read: float, products: float) -> float:
        read = numbers_read * model.bytes_each / machine.bandwidth
        return max(read, 2 * products / machine.flops) / ranks

    matrices = longer(model.layer_weights, tokens * model.layer_weights)
    attention = longer(
        batch * context * model.kv_numbers,
        2 * tokens * context * model.heads * model.head_dim,
    )
    lm_head = longer(model.lm_head_weights, tokens * model.lm_head_weights)
    reduced = 2 * all_reduce_seconds(model, machine, tokens, ranks)
    return machine.overhead + model.layers * (matrices + attention + reduced) + lm_head


def all_reduce_seconds(model: Model, machine: Machine, tokens: int, ranks: int) -> float:
    """Seconds to sum the hidden states of `tokens` over `ranks`, in a ring."""
    if ranks == 1:
        return 0.0
    sent = 2 * (ranks - 1) / ranks * tokens * model.hidden * model.bytes_each
    return machine.hop + sent / machine.link


def draft_seconds(
    model: Model, machine: Machine, heads: Heads, batch: int, ranks: int = 1
) -> float:
    """Seconds to draft a block for `batch` requests: sharded heads, two small exchanges."""
    read = heads.weights(model) * model.bytes_each / machine.bandwidth
    multiplied = 2 * batch * heads.products(model) / machine.flops
    joined = all_reduce_seconds(model, machine, batch * heads.count, ranks)
    chosen = machine.hop if ranks > 1 else 0.0  # values and ids: a few bytes
    return max(read, multiplied) / ranks + joined + chosen


def gain(
    model: Model,
    machine: Machine,
    heads: Heads,
    block: int,
    accepted: float,
    batch: int,
    context: int,
    ranks: int = 1,
) -> float:
    """Tokens a second with `bpd` relative to none, where a step gives `accepted` tokens.

    `accepted` is the mean accepted block, k-hat, of blocks of `block` tokens.
    """
    plain = step_seconds(model, machine, batch, 1, context, ranks)
    verified = step_seconds(model, machine, batch, block, context, ranks)
    return accepted * plain / (verified + draft_seconds(model, machine, heads, batch, ranks))


def fits(model: Model, machine: Machine, batch: int, context: int, ranks: int) -> bool:
    """Whether weights and cache leave a tenth of the memory of `ranks` machines free."""
    weights = model.layers * model.layer_weights + 2 * model.lm_head_weights  # and the embedding
    cache = model.layers * batch * context * model.kv_numbers
    return (weights + cache) * model.bytes_each <= 0.9 * ranks * machine.memory


# Public figures of the makers, dense bfloat16. `hop`: what NCCL needs for a small all-reduce.
LLAMA_70B = Model("Llama 3 70B", 80, 8192, 64, 8, 128, 28672, 128256)
H100 = Machine("H100 SXM", 989e12, 3.35e12, 80e9, 450e9, 8e-6, 100e-6)
# Tokens a step by k, as docs/acceptance.md measured them for four heads and the requests' own
# text, on a target of 135M (benchmarks/results/head-shapes.json). A large target's own must be
# measured before they are believed.
ACCEPTED = {2: 1.667, 3: 2.078, 5: 2.518, 9: 2.857}
MOST_HEADS = 4  # further places go on with the text alone
RANKS = (2, 4, 8)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXT = 2048


def plan_heads(block: int) -> Heads:
    """Heads for a 70B target: 2,048 hidden units each, 32,000 ids scored."""
    count = min(block - 1, MOST_HEADS)
    return Heads(count, 2048 * count, 32000)


def table() -> list[dict[str, float]]:
    """Every point of the plan that fits into memory: what a step costs, and the gain."""
    rows = []
    for ranks, block, batch in itertools.product(RANKS, ACCEPTED, BATCHES):
        if not fits(LLAMA_70B, H100, batch, CONTEXT, ranks):
            continue
        gained = gain(
            LLAMA_70B, H100, plan_heads(block), block, ACCEPTED[block], batch, CONTEXT, ranks
        )
        plain = step_seconds(LLAMA_70B, H100, batch, 1, CONTEXT, ranks)
        verified = step_seconds(LLAMA_70B, H100, batch, block, CONTEXT, ranks)
        rows.append(
            {
                "ranks": ranks,
                "block": block,
                "batch": batch,
                "step_ms": round(1e3 * plain, 3),
                "step_ratio": round(verified / plain, 4),
                "gain": round(gained, 4),
            }
        )
    return rows


def draw(rows: Sequence[dict[str, float]], path: Path) -> None:
    """Gain over batch, a panel for each number of ranks and a line for each block."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "bpd"  # the same bytes each time
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(RANKS), figsize=(9, 3.2), sharey=True)
    for panel, ranks in zip(panels, RANKS, strict=True):
        for block in ACCEPTED:
            line = [row for row in rows if (row["ranks"], row["block"]) == (ranks, block)]
            batches = [row["batch"] for row in line]
            panel.plot(batches, [row["gain"] for row in line], label=f"k = {block}")
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.set(title=f"tensor parallel {ranks}", xlabel="requests at once", xscale="log")
    panels[0].set_ylabel("tokens/s, relative to none")
    panels[-1].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Compute, draw and write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.roofline", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--output", type=Path, default=_RESULTS, help="JSON file")
    parser.add_argument("--picture", type=Path, default=_PICTURE, help="SVG file")
    args = parser.parse_args()
    rows = table()
    found = {
        "model": asdict(LLAMA_70B),
        "machine": asdict(H100),
        "accepted": ACCEPTED,
        "context": CONTEXT,
        "points": rows,
    }
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(rows, args.picture)
    for row in rows:
        if row["batch"] in (1, 16, 128, 512):
            print(
                f"tp {row['ranks']}, k {row['block']}, batch {row['batch']:3}: a step costs "
                f"{row['step_ratio']:.2f}, gain {row['gain']:.2f}"
            )


if __name__ == "__main__":
    main()
