"""The table and the picture of `make bench`, from its raw results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contenders import PLAIN

Row = dict[str, Any]  # one run: contender, concurrency, temperature, round, and its figures


def ratios(
    rows: Sequence[Row], contender: str, concurrency: int, temperature: float
) -> list[float]:
    """Speed over no speculation's in the same round, ascending."""
    speeds = {
        (row["contender"], row["round"]): row["tokens_per_second"]
        for row in rows
        if row["concurrency"] == concurrency and row["temperature"] == temperature
    }
    return sorted(
        speed / speeds[PLAIN, number]
        for (name, number), speed in speeds.items()
        if name == contender
    )


def summarise(rows: Sequence[Row]) -> list[Row]:
    """A line for each temperature, concurrency and contender, in the order they were run."""
    keys = dict.fromkeys((r["temperature"], r["concurrency"], r["contender"]) for r in rows)
    lines = []
    for temperature, concurrency, contender in keys:
        own = [
            row
            for row in rows
            if (row["temperature"], row["concurrency"], row["contender"])
            == (temperature, concurrency, contender)
        ]
        found = ratios(rows, contender, concurrency, temperature)
        drafts = sum(row["num_drafts"] for row in own)
        accepted = sum(row["accepted_tokens"] for row in own)
        verified = sum(row["draft_tokens"] for row in own)
        lines.append(
            {
                "temperature": temperature,
                "concurrency": concurrency,
                "contender": contender,
                "ratio": (found[0], median(found), found[-1]),
                "mean_accepted_block": 1 + accepted / drafts if drafts else None,
                "accepted_per_draft_token": accepted / verified if verified else None,
                **{
                    name: median(row[name] for row in own)
                    for name in ("tokens_per_second", "ttft_p50", "itl_p50", "itl_p99")
                },
            }
        )
    return lines


def as_markdown(rows: Sequence[Row]) -> str:
    """The summary as Markdown, a table a temperature. Latencies in milliseconds."""
    lines = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        own = [row for row in rows if row["temperature"] == temperature]
        lines += [
            f"Temperature {temperature:g}:\n",
            *ratio_table(own),
            "",
            "| at once | | tokens/s | over no speculation: median (min-max) | mean accepted block "
            "| accepted / drafted | first token, ms | between tokens p50, p99, ms |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for line in summarise(own):
            low, middle, high = line["ratio"]
            lines.append(
                f"| {line['concurrency']} | {line['contender']} | {line['tokens_per_second']:.0f} "
                f"| {middle:.2f} ({low:.2f}-{high:.2f}) | {_or_dash(line['mean_accepted_block'])} "
                f"| {_or_dash(line['accepted_per_draft_token'])} | {1e3 * line['ttft_p50']:.0f} "
                f"| {1e3 * line['itl_p50']:.0f}, {1e3 * line['itl_p99']:.0f} |"
            )
        lines.append("")
    return "\n".join(lines)


def ratio_table(rows: Sequence[Row]) -> list[str]:
    """Median speed over no speculation's, a line a contender, a column a level of concurrency.

    The best of a column is bold, no speculation's 1 among them. `rows` are of one temperature.
    """
    found = {(line["contender"], line["concurrency"]): line["ratio"][1] for line in summarise(rows)}
    names, sizes = (dict.fromkeys(key[place] for key in found) for place in (0, 1))
    best = {size: max(found[name, size] for name in names) for size in sizes}
    lines = [
        "| requests at once | " + " | ".join(map(str, sizes)) + " |",
        "|---|" + "---|" * len(sizes),
    ]
    for name in names:
        cells = []
        for size in sizes:
            cell = f"{found[name, size]:.2f}"
            cells.append(f"**{cell}**" if found[name, size] == best[size] else cell)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def ready_table(ready: dict[str, dict[str, float]]) -> list[str]:
    """What each contender's server took to start, and the memory of its processes, as Markdown."""
    lines = ["| | ready after, s | memory, MiB |", "|---|---|---|"]
    for name, found in ready.items():
        lines.append(f"| {name} | {found['ready_seconds']:.0f} | {found['memory_mib']:.0f} |")
    return lines


def write_plot(path: Path, rows: Sequence[Row]) -> None:
    """Speed over no speculation by concurrency, a panel a temperature, into `path`."""
    from matplotlib.figure import Figure  # draws without a display

    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    figure = Figure(figsize=(6.5 * len(temperatures), 4.5), layout="constrained")
    panels = figure.subplots(1, len(temperatures), squeeze=False, sharey=True)[0]
    for axes, temperature in zip(panels, temperatures, strict=True):
        found = summarise([row for row in rows if row["temperature"] == temperature])
        for name in dict.fromkeys(line["contender"] for line in found):
            own = [line for line in found if line["contender"] == name]
            sizes = [line["concurrency"] for line in own]
            low, middle, high = zip(*(line["ratio"] for line in own), strict=True)
            if name == PLAIN:
                axes.plot(sizes, middle, color="black", linewidth=1, label=name)
                continue
            (drawn,) = axes.plot(sizes, middle, marker="o", label=name)
            axes.fill_between(sizes, low, high, color=drawn.get_color(), alpha=0.15)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set(title=f"temperature {temperature:g}", xlabel="requests at once")
    panels[0].set_ylabel("tokens/s over no speculation")
    panels[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
