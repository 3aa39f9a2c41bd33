"""The demo refuses what it could only find out after minutes; the rest `make demo` shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_bpd.demo import __main__ as demo


def test_an_output_that_is_a_file_is_refused_before_any_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "figures.json"
    file.write_text("kept")
    monkeypatch.setattr("sys.argv", ["demo", "--target", "nowhere", "--output", str(file)])
    with pytest.raises(SystemExit, match=r"output: found .*figures\.json, .*\(File exists\)"):
        demo.main()
    assert file.read_text() == "kept"


def test_an_output_folder_is_made(tmp_path: Path) -> None:
    demo.make_folder(tmp_path / "a" / "b")
    demo.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
