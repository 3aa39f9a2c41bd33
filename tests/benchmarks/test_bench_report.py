"""What `make bench` makes of its raw results."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import side_by_side
from benchmarks.acceptance import read_categories
from benchmarks.bench_report import as_markdown, ratios, ready_table, summarise, write_plot
from benchmarks.client import figures
from benchmarks.contenders import PLAIN, Contender, contenders
from benchmarks.live_server import LiveServer, proportional_kib, require_memory
from vllm_bpd.errors import HeadsError


def row(contender: str, number: int, speed: float, **changed: Any) -> dict[str, Any]:
    return {
        "contender": contender,
        "round": number,
        "concurrency": 1,
        "temperature": 0.0,
        "tokens_per_second": speed,
        "ttft_p50": 0.02,
        "itl_p50": 0.01,
        "itl_p99": 0.03,
        "num_drafts": 0,
        "draft_tokens": 0,
        "accepted_tokens": 0,
        **changed,
    }


ROWS = [
    row(PLAIN, 0, 10.0),
    row("bpd", 0, 30.0, num_drafts=10, draft_tokens=40, accepted_tokens=10),
    row(PLAIN, 1, 20.0),
    row("bpd", 1, 20.0, num_drafts=10, draft_tokens=20, accepted_tokens=20),
    row(PLAIN, 0, 100.0, concurrency=8),
    row("bpd", 0, 90.0, concurrency=8),
    row(PLAIN, 2, 10.0),
    row("bpd", 2, 20.0),
]


def test_ratios_are_of_one_round_and_level() -> None:
    assert ratios(ROWS, "bpd", 1, 0.0) == [1.0, 2.0, 3.0]
    assert ratios(ROWS, "bpd", 8, 0.0) == [0.9]
    assert ratios(ROWS, PLAIN, 1, 0.0) == [1.0, 1.0, 1.0]


def test_a_line_sums_the_rounds() -> None:
    lines = {(line["concurrency"], line["contender"]): line for line in summarise(ROWS)}
    assert lines[1, "bpd"]["ratio"] == (1.0, 2.0, 3.0)
    assert lines[1, "bpd"]["mean_accepted_block"] == 1 + 30 / 20
    assert lines[1, "bpd"]["accepted_per_draft_token"] == 30 / 60
    assert lines[1, "bpd"]["tokens_per_second"] == 20.0
    assert lines[1, PLAIN]["mean_accepted_block"] is None


def test_the_table_has_a_line_for_each_contender_and_level() -> None:
    table = as_markdown(ROWS).splitlines()
    assert "| 1 | bpd | 20 | 2.00 (1.00-3.00) | 2.50 | 0.50 | 20 | 10, 30 |" in table
    assert "| 8 | bpd | 90 | 0.90 (0.90-0.90) | - | - | 20 | 10, 30 |" in table
    assert "| bpd | **2.00** | 0.90 |" in table
    assert f"| {PLAIN} | 1.00 | **1.00** |" in table
    # Four and two lines and their headings.
    assert len([line for line in table if line.startswith("| ")]) == 8


def test_the_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bench.svg"
    write_plot(path, ROWS)
    assert path.read_text(encoding="utf-8").lstrip().startswith("<?xml")


def test_start_and_memory_have_a_line_for_each_contender() -> None:
    ready = {"bpd": {"ready_seconds": 12.4, "memory_mib": 1023.6}}
    assert ready_table(ready)[2:] == ["| bpd | 12 | 1024 |"]


def test_memory_is_of_the_whole_session(tmp_path: Path) -> None:
    """A child's counts; another session's does not, and shared pages count in part."""
    assert proportional_kib("00-ff ---p 0 00:00 0 [rollup]\nRss: 90 kB\nPss:  7 kB\n") == 7
    assert proportional_kib("Rss: 90 kB\n") == 0
    held = "x = bytearray(64 << 20); print(flush=True); import time; time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {held!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        server = LiveServer.__new__(LiveServer)
        server.process = process
        assert 64 < server.memory_mib() < 256
        os.killpg(process.pid, signal.SIGKILL)


def test_too_little_memory_is_refused() -> None:
    require_memory("MemTotal: 9 kB\nMemAvailable: 6291456 kB\n")
    with pytest.raises(HeadsError, match=r"memory: 4\.0 GiB are left .*--only"):
        require_memory("MemTotal: 9 kB\nMemAvailable: 4194304 kB\n")


RESULT = {
    "failed": 0,
    "completed": 2,
    "total_output_tokens": 8,
    "duration": 2.0,
    "output_throughput": 4.0,
    "ttfts": [0.1, 0.3],
    "itls": [[0.01, 0.02], [0.03]],
    "errors": ["", ""],
}


def test_figures_of_the_clients_result() -> None:
    found = figures(RESULT | {"spec_decode_num_drafts": 3})
    assert (found["tokens_per_second"], found["num_drafts"], found["draft_tokens"]) == (4.0, 3, 0)
    assert found["ttft_p50"] == pytest.approx(0.2)
    assert found["itl_p50"] == pytest.approx(0.02)


def test_a_load_with_failed_requests_counts_for_nothing() -> None:
    with pytest.raises(RuntimeError, match=r"1 requests failed: .*refused"):
        figures(RESULT | {"failed": 1, "errors": ["", "refused"]})


def test_heads_and_schedule_reach_the_contenders(tmp_path: Path) -> None:
    tuned = tmp_path / "tuned.json"
    tuned.write_text('{"method": "bpd", "min_confidence_per_batch_size": [[1, 9, 0.5]]}')
    found = {one.name: one for one in contenders("HEADS", tuned)}
    assert found[PLAIN].speculative is None
    ours = {name: one.speculative for name, one in found.items() if name.startswith("bpd")}
    assert all(config and config["model"] == "HEADS" for config in ours.values())
    assert ours["bpd, tuned"] == {
        "method": "bpd",
        "model": "HEADS",
        "min_confidence_per_batch_size": [[1, 9, 0.5]],
    }
    assert "bpd, tuned" not in {one.name for one in contenders(None, None)}


def test_a_contender_without_its_package_is_left_out_by_name() -> None:
    missing = Contender("other", {}, "no_such_package").missing
    assert missing == "other: left out, no_such_package is not installed"
    assert Contender("ours", {}, "json").missing is None


def test_a_tuned_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadsError, match="not readable as a speculative config"):
        contenders(None, tmp_path / "missing.json")


@pytest.mark.parametrize(("only", "found"), [("typo", "'typo'"), ("bpd", "no 'no speculation'")])
def test_names_of_contenders_are_checked_first(only: str, found: str) -> None:
    arguments = argparse.Namespace(heads=None, tuned=None, only=[only])
    with pytest.raises(HeadsError, match=f"only: found {found}; expected "):
        side_by_side.run(arguments)


@pytest.mark.parametrize(
    "line", ['{"turns": []}', '{"turns": null}', '{"prompt": "x", "category": ["a"]}', ""]
)
def test_prompts_that_are_none_are_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(HeadsError, match=r"prompts: .*expected"):
        read_categories(path)
