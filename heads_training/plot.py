"""The evaluation's picture: accuracy by head, k-hat by k, k-hat by group of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heads_training.lattice_walk import threshold_key
from vllm_bpd.errors import HeadsError

_SUFFIXES = (".png", ".svg")
_BLUE, _LIGHT, _DARK = "#4c78a8", "#9ecae9", "#1f3a5f"
_MOST_GROUPS = 12  # bars; the largest groups are shown


def check_plot_path(path: Path) -> None:
    """Raise HeadsError for a file name that no picture can have; asked before hours of work."""
    if path.suffix not in _SUFFIXES:
        raise HeadsError(f"plot: found {path}; expected a file name with {' or '.join(_SUFFIXES)}")


def write_plot(path: Path, report: dict[str, Any]) -> None:
    """Draw the report of `walk_report` into `path`, .png or .svg, the folder made if needed."""
    from matplotlib.figure import Figure  # draws without a display

    check_plot_path(path)
    figure = Figure(figsize=(13, 4), layout="constrained")
    by_head, by_k, by_group = figure.subplots(1, 3, width_ratios=(4, 3, 5))
    _draw_heads(by_head, report["by_head"])
    _draw_k(by_k, report["by_k"], report.get("with_own_text"))
    _draw_groups(by_group, report["by_group"])
    title = " on ".join(str(report[name]) for name in ("heads", "target") if name in report)
    size = f"{report['answers']} answers, {report['answer_tokens']} tokens"
    figure.suptitle(f"{title}: {size}" if title else size)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_heads(axes: Any, heads: list[dict[str, float]]) -> None:
    """Three bars a head."""
    bars = (("marginal", _LIGHT), ("conditional", _BLUE), ("cumulative", _DARK))
    for place, (name, colour) in enumerate(bars):
        where = [number + (place - 1) * 0.27 for number in range(1, len(heads) + 1)]
        axes.bar(where, [head[name] for head in heads], 0.27, label=name, color=colour)
    axes.set(title="accuracy by head", xlabel="head", ylim=(0, 1), xticks=range(1, len(heads) + 1))
    axes.legend()


def _draw_k(axes: Any, heads: dict[str, Any], with_own_text: dict[str, Any] | None) -> None:
    """The heads alone and, for heads with a lattice, with the request's own text at 0.0."""
    lines = [("heads alone", heads, _BLUE)]
    if with_own_text is not None:
        lines.append(
            ("with the request's own text", with_own_text[threshold_key(0.0)]["by_k"], _DARK)
        )
    highest = 1.0
    for label, rows, colour in lines:
        sizes, values = [int(k) for k in rows], [row["k_hat"] for row in rows.values()]
        axes.plot(sizes, values, marker="o", color=colour, label=label)
        for k, value in zip(sizes, values, strict=True):
            axes.annotate(
                f"{value:.2f}", (k, value), (0, 6), textcoords="offset points", ha="center"
            )
        axes.set_xticks(sizes)
        highest = max(highest, *values)
    axes.set(title="mean accepted block by k", xlabel="k", ylabel="tokens")
    axes.set_ylim(1, highest * 1.12)
    axes.margins(x=0.12)
    axes.legend(loc="lower right")


def _draw_groups(axes: Any, rows: dict[str, Any]) -> None:
    """A bar a group, the groups with most steps."""
    largest = sorted(rows, key=lambda name: -int(rows[name]["steps"]))[:_MOST_GROUPS]
    names = sorted(largest, key=lambda name: float(rows[name]["k_hat"]))
    values = [rows[name]["k_hat"] for name in names]
    drawn = axes.barh([name[:32] for name in names], values, color=_BLUE)
    axes.bar_label(drawn, [f"{value:.2f}" for value in values], padding=3)
    axes.set(title="mean accepted block by group", xlabel="tokens")
    axes.set_xlim(1, max([*values, 1.1]) * 1.08)
