"""Commands of the README and of docs/bpd-train.md exist and parse.

`integration_tests/test_ways_in.py` and `integration_tests/distributed` serve with the README's.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from heads_training.cli import main as bpd_train
from vllm_bpd.cli import main as vllm_bpd

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "bpd-train.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (.*?)(?:\s+#.*)?$", README + GUIDE, flags=re.MULTILINE)


def commands(program: str) -> list[str]:
    found = [command for command in COMMANDS if command.split()[0] == program]
    assert found, f"README has no {program} command any more"
    return found


def test_every_command_is_of_a_program_that_is_tested() -> None:
    tested = {"make", "pip", "vllm", "vllm-bpd", "bpd-train", "ray"}
    assert {command.split()[0] for command in COMMANDS} <= tested


@pytest.mark.parametrize("command", commands("make"))
def test_make_targets_exist(command: str) -> None:
    done = subprocess.run(
        ["make", "-n", *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", commands("bpd-train"))
def test_training_commands_parse(
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """They get as far as a target that is not there; recipe.yaml is the guide's own."""
    monkeypatch.chdir(tmp_path)
    (recipe,) = re.findall(r"^```yaml\n(.*?)^```", GUIDE, flags=re.MULTILINE | re.DOTALL)
    Path("recipe.yaml").write_text(recipe.replace("MODEL", "no-such-folder/x/y"))
    words = [w.replace("MODEL", "no-such-folder/x/y") for w in shlex.split(command)[1:]]
    status = bpd_train(words)
    error = capsys.readouterr().err
    assert status == 2
    assert "no-such-folder/x/y" in error
    assert "usage" not in error


@pytest.mark.parametrize("command", commands("ray"))
def test_rays_commands_parse(command: str) -> None:
    """`integration_tests/distributed` runs engines on a Ray of its own."""
    scripts = pytest.importorskip("ray.scripts.scripts", reason="Ray is an extra of its own")
    _, name, *words = shlex.split(command)
    assert scripts.cli.commands[name].make_context(name, words).params


@pytest.mark.parametrize("command", commands("vllm-bpd"))
def test_the_plugins_command_answers(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm", reason="doctor examines vLLM")
    words = [w.replace("MODEL", "no-such-folder/x/y") for w in shlex.split(command)[1:]]
    assert vllm_bpd(words) == 1
    said = capsys.readouterr()
    assert "model: no heads found for no-such-folder/x/y" in said.out + said.err


def test_paths_named_in_the_readme_exist() -> None:
    listed = re.search(r"```\n(vllm_bpd/.*?)```", README, flags=re.DOTALL)
    assert listed is not None
    top = ""
    for line in listed[1].splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            top = name
        path = ROOT / (name if name == top else top + name)
        assert path.exists(), f"README names {path.relative_to(ROOT)}, which is not there"
