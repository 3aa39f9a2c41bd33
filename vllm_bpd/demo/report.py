"""What the demo shows: a table, and one answer with its accepted blocks in colour."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_bpd.demo.contender import Answer

# A block of n tokens costs one target call; its colour says how many it saved.
_COLOURS = ("default", "green", "cyan", "yellow", "magenta", "red", "blue", "bright_red")


@dataclass(frozen=True)
class Comparison:
    """Both contenders' answers to the same prompts."""

    prompts: tuple[str, ...]
    plain: tuple[Answer, ...]  # without speculation
    bpd: tuple[Answer, ...]  # with blockwise heads
    counters: dict[str, Any]  # the engine's speculation counters of the bpd run
    margins: dict[int, float]  # prompt index -> top-2 margin where its answers first differ
    dtype: str  # of the target, as served

    def speed(self, answers: tuple[Answer, ...]) -> float:
        """Tokens a second over all answers."""
        return sum(len(a.token_ids) for a in answers) / sum(a.seconds for a in answers)

    @property
    def ratio(self) -> float:
        """Speed with bpd over speed without."""
        return self.speed(self.bpd) / self.speed(self.plain)

    @property
    def mean_accepted_block(self) -> float:
        """k-hat: 1 + accepted draft tokens / drafts, by the engine's counters."""
        accepted, drafts = self.counters["num_accepted_tokens"], self.counters["num_drafts"]
        return 1 + float(accepted) / float(drafts)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of drafts whose i-th token was accepted."""
        drafts = self.counters["num_drafts"]
        return [count / drafts for count in self.counters["num_accepted_tokens_per_pos"]]

    @property
    def identical(self) -> int:
        """How many answers are the same, token for token."""
        return sum(a.token_ids == b.token_ids for a, b in zip(self.plain, self.bpd, strict=True))


def first_difference(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Index of the first token in which two answers differ."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def show(result: Comparison, tokenizer: Any, console: Console) -> None:
    """Print table and marked answer."""
    table = Table(title=f"{len(result.prompts)} prompts, greedy, one at a time, {result.dtype}")
    table.add_column("")
    table.add_column("no speculation", justify="right")
    table.add_column("bpd", justify="right")
    plain, bpd = result.speed(result.plain), result.speed(result.bpd)
    table.add_row("tokens/s", f"{plain:.1f}", f"{bpd:.1f}  ({result.ratio:.2f}x)")
    table.add_row("mean accepted block", "1", f"{result.mean_accepted_block:.2f}")
    shares = "  ".join(f"{share:.2f}" for share in result.acceptance_by_position)
    table.add_row("acceptance by position", "", shares)
    table.add_row("identical answers", "", f"{result.identical} of {len(result.prompts)}")
    console.print(table)
    for index, margin in result.margins.items():
        at = first_difference(result.plain[index].token_ids, result.bpd[index].token_ids)
        console.print(
            f"answer {index + 1}: another token from number {at + 1} on; top-2 margin there "
            f"{margin:.3f} nats: {_verdict(margin, result.dtype)}"
        )
    best = max(range(len(result.bpd)), key=lambda i: _mean(result.bpd[i].blocks))
    mean = _mean(result.bpd[best].blocks)
    console.print(f"\nThe answer with the longest blocks ({mean:.2f} tokens each on average):")
    console.print(f"[bold]{result.prompts[best]}[/bold]")
    console.print(marked(result.bpd[best], tokenizer))
    legend = Text("tokens from one target call: ")
    for size in range(1, len(result.acceptance_by_position) + 2):
        legend.append(f" {size} ", style=f"reverse {_colour(size)}")
    console.print(legend)


def marked(answer: Answer, tokenizer: Any) -> Text:
    """The answer's text, each block in the colour of its size, blocks set apart."""
    text, start = Text(), 0
    for block in answer.blocks:
        ids = answer.token_ids[: start + block]
        before = tokenizer.decode(answer.token_ids[:start], skip_special_tokens=True)
        piece = tokenizer.decode(ids, skip_special_tokens=True)[len(before) :]
        text.append(piece, style=_colour(block) + (" underline" if block > 1 else ""))
        start += block
    return text


def save(result: Comparison, console: Console, folder: Path) -> None:
    """What `console` has shown as a picture, demo.svg, and the figures as demo.json."""
    console.save_svg(str(folder / "demo.svg"), title="vllm-bpd demo")
    figures = {
        "made_by": "make demo",
        "versions": {name: version(name) for name in ("vllm", "torch", "vllm-bpd")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "dtype": result.dtype,
        "prompts": len(result.prompts),
        "tokens_per_second": {
            "no speculation": result.speed(result.plain),
            "bpd": result.speed(result.bpd),
        },
        "ratio": result.ratio,
        "mean_accepted_block": result.mean_accepted_block,
        "acceptance_by_position": result.acceptance_by_position,
        "identical": result.identical,
        "margins": result.margins,
        "seconds": [[a.seconds, b.seconds] for a, b in zip(result.plain, result.bpd, strict=True)],
        "blocks": [answer.blocks for answer in result.bpd],
    }
    (folder / "demo.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _verdict(margin: float, dtype: str) -> str:
    """Whether rounding explains a difference.

    Logits of 16 to 32 lie 2**-3 apart in bfloat16 and 2**-6 in float16; each of the two may move
    by about one such step when a block is scored in one product instead of token by token.
    """
    explained = {"bfloat16": 0.25, "float16": 2**-5}.get(dtype, 1e-4)
    return f"within {dtype} rounding" if margin <= explained else "NOT explained by rounding"


def _colour(block: int) -> str:
    return _COLOURS[min(block, len(_COLOURS)) - 1]


def _mean(blocks: tuple[int, ...]) -> float:
    return sum(blocks) / max(len(blocks), 1)
