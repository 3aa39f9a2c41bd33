"""A process that receives a `bpd` config has the same plugin, or says what it lacks, and where."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_bpd.samples import one_line
from vllm_bpd import arrival
from vllm_bpd.arrival import arrive, plugin_version, send_by_value

HOST = socket.gethostname()


def test_the_same_plugin_is_taken() -> None:
    pytest.importorskip("vllm", reason="the config subclasses vLLM's")
    from vllm_bpd.speculative import BpdSpeculativeConfig

    assert type(arrive(plugin_version())) is BpdSpeculativeConfig


@pytest.mark.parametrize("found", ["0.0.9", "none"])
def test_another_version_is_refused_with_its_host(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr(arrival, "plugin_version", lambda: found)
    with pytest.raises(RuntimeError) as caught:
        arrive("1.2.3")
    assert one_line(caught.value) == (
        f"speculative method bpd: host {HOST}: vllm-bpd: found {found}; the front end has 1.2.3; "
        "install vllm-bpd 1.2.3 in the environment of every node"
    )


@pytest.mark.parametrize("lacks", ["the code", "the version"])
def test_on_ray_a_node_without_the_plugin_says_so_itself(tmp_path: Path, lacks: str) -> None:
    """The code that says it travels with the config, so it need not be installed there."""
    cloudpickle = pytest.importorskip("ray.cloudpickle", reason="how Ray sends a config")
    send_by_value()
    expected = plugin_version() if lacks == "the code" else "1.2.3"
    sent = tmp_path / "sent"
    sent.write_bytes(cloudpickle.dumps(Sent(expected)))
    (tmp_path / "vllm_bpd").mkdir()
    missing = "raise ModuleNotFoundError(\"No module named 'vllm_bpd'\", name='vllm_bpd')"
    (tmp_path / "vllm_bpd" / "__init__.py").write_text(missing)
    done = subprocess.run(
        [sys.executable, "-c", f"import pickle; pickle.load(open({str(sent)!r}, 'rb'))"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = {
        "the code": "not importable (No module named 'vllm_bpd'); ",
        "the version": f"found {plugin_version()}; the front end has 1.2.3; ",
    }[lacks]
    assert done.stderr.splitlines()[-1] == (
        f"RuntimeError: speculative method bpd: host {HOST}: vllm-bpd: {found}install vllm-bpd "
        f"{expected} in the environment of every node"
    )


class Sent:
    """Leaves for another process as the config does."""

    def __init__(self, version: str) -> None:
        self.version = version

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, (self.version,)


def test_within_one_machine_it_goes_by_name() -> None:
    assert b"vllm_bpd.arrival" in pickle.dumps(arrive)
