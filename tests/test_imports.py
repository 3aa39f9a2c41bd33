"""What may import what, and how long files and functions may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("vllm_bpd", "heads_training", "integration_tests", "tests", "scripts", "benchmarks")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
# Training starts the engine in a process of its own; these must do without it, and its import.
WITHOUT_VLLM = [
    "vllm_bpd",
    *(
        f"vllm_bpd.{name}"
        for name in (
            "checkpoint", "config", "discovery", "entry", "errors", "fingerprint", "formats",
            "heads", "lattice", "patches", "patching", "proposer", "tally",
        )
    ),
    *(
        f"heads_training.{path.stem}".removesuffix(".__init__")
        for path in sorted((ROOT / "heads_training").glob("*.py"))
    ),
]  # fmt: skip


def test_what_does_not_serve_imports_no_vllm() -> None:
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    found = sorted(m for m in sys.modules if m.split('.')[0] == 'vllm')\n"
        "    assert not found, f'{name} imports {found[0]}'\n"
    )
    command = [sys.executable, "-c", script, *WITHOUT_VLLM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def imported(path: Path) -> set[str]:
    """Top-level names of all packages that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names.add(str(node.module).split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_packages_point_one_way(path: Path) -> None:
    """The plugin is installed without its tests, and serves without the training package."""
    package = path.relative_to(ROOT).parts[0]
    forbidden = {"tests", "integration_tests", "benchmarks", "scripts"}
    if package == "vllm_bpd":
        forbidden |= {"heads_training"}
    if package in ("vllm_bpd", "heads_training"):
        assert not imported(path) & forbidden


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert length(node) <= 60, f"{node.name} has {length(node)} lines"


def test_no_file_is_named_for_nothing() -> None:
    assert [path for path in FILES if path.stem in ("utils", "util", "helpers", "misc")] == []


def test_files_are_found() -> None:
    assert ROOT / "vllm_bpd" / "patching.py" in FILES
