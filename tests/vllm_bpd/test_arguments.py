"""Options that are refused before anything long begins, in one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_bpd.arguments import at_least_one, output_file, output_folder, positive, run_command
from vllm_bpd.errors import HeadsError


def refusal(kind: Callable[[str], object], text: str) -> str:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        kind(text)
    return str(caught.value)


def test_an_output_that_could_not_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert refusal(output_file, str(tmp_path)).endswith("a folder; expected a file to write")
    assert "cannot be a folder" in refusal(output_file, str(file / "x.json"))
    assert "cannot be a folder" in refusal(output_folder, str(file))
    made = output_file(str(tmp_path / "a" / "b.json"))
    assert made.parent.is_dir()
    assert not made.exists()
    assert output_file(str(file)) == file  # written anew
    assert output_folder(str(tmp_path / "c")).is_dir()


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "many", ""])
def test_counts_begin_at_one(text: str) -> None:
    assert refusal(at_least_one, text) == f"found {text!r}; expected 1 or more"
    assert at_least_one("3") == 3


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x"])
def test_numbers_are_finite_and_above_zero(text: str) -> None:
    assert refusal(positive, text) == f"found {text!r}; expected a number above 0"
    assert positive("0.5") == 0.5


def test_a_mistake_and_an_interruption_end_in_one_line() -> None:
    def mistaken() -> None:
        raise HeadsError("k: found 1; expected 2")

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match=r"^error: k: found 1; expected 2$"):
        run_command(mistaken)
    with pytest.raises(SystemExit, match="interrupted"):
        run_command(interrupted)
