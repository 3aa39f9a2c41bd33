"""A process that receives a `bpd` config has the same plugin, or says what it lacks, and where."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm_bpd.samples import one_line
from vllm_bpd import arrival
from vllm_bpd.arrival import arrive, plugin_build, plugin_version, send_by_value

HOST = socket.gethostname()


def test_the_same_plugin_is_taken() -> None:
    pytest.importorskip("vllm", reason="the config subclasses vLLM's")
    from vllm_bpd.speculative import BpdSpeculativeConfig

    assert type(arrive(plugin_version())) is BpdSpeculativeConfig
    assert type(arrive(plugin_version(), plugin_build())) is BpdSpeculativeConfig


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


def test_another_build_of_the_same_version_is_refused_with_its_host() -> None:
    found = plugin_build()
    assert found is not None
    with pytest.raises(RuntimeError) as caught:
        arrive(plugin_version(), "f" * 64)
    assert one_line(caught.value) == (
        f"speculative method bpd: host {HOST}: vllm-bpd: found build {found[:12]}; the front end "
        f"has build ffffffffffff; both are {plugin_version()}: install the same commit of vllm-bpd "
        "in the environment of every node"
    )


def test_a_build_is_names_and_contents_of_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(arrival, "find_spec", lambda name: spec)
    assert plugin_build() is None  # as where only compiled modules are installed
    (tmp_path / "b.py").write_text("2")
    (tmp_path / "a.py").write_text("1")
    builds = [plugin_build(), plugin_build()]
    (tmp_path / "notes.txt").write_text("3")
    builds.append(plugin_build())
    assert len(set(builds)) == 1
    (tmp_path / "a.py").write_text("1 ")
    builds.append(plugin_build())
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    builds.append(plugin_build())
    assert len(set(builds)) == 3
    monkeypatch.setattr(arrival, "find_spec", lambda name: None)
    assert plugin_build() is None


def test_a_config_leaves_with_its_build() -> None:
    pytest.importorskip("vllm", reason="the config subclasses vLLM's")
    from vllm_bpd.speculative import BpdSpeculativeConfig

    config = BpdSpeculativeConfig.__new__(BpdSpeculativeConfig)
    assert config.__reduce__()[1] == (plugin_version(), plugin_build())


@pytest.mark.parametrize("lacks", ["the code", "the version", "the build"])
def test_on_ray_a_node_without_the_plugin_says_so_itself(tmp_path: Path, lacks: str) -> None:
    """The code that says it travels with the config, so it need not be installed there."""
    cloudpickle = pytest.importorskip("ray.cloudpickle", reason="how Ray sends a config")
    send_by_value()
    expected = "1.2.3" if lacks == "the version" else plugin_version()
    sent = tmp_path / "sent"
    sent.write_bytes(cloudpickle.dumps(Sent(expected, plugin_build())))
    (tmp_path / "vllm_bpd").mkdir()
    missing = "raise ModuleNotFoundError(\"No module named 'vllm_bpd'\", name='vllm_bpd')"
    init = "" if lacks == "the build" else missing
    (tmp_path / "vllm_bpd" / "__init__.py").write_text(init)
    build = sha256(f"__init__.py {len(init)}\n{init}".encode()).hexdigest()[:12]
    done = subprocess.run(
        [sys.executable, "-c", f"import pickle; pickle.load(open({str(sent)!r}, 'rb'))"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    ours = plugin_build()
    assert ours is not None
    found = {
        "the code": "not importable (No module named 'vllm_bpd'); ",
        "the version": f"found {plugin_version()}; the front end has 1.2.3; ",
        "the build": f"found build {build}; the front end has build {ours[:12]}; both are "
        f"{expected}: ",
    }[lacks]
    wanted = "the same commit of vllm-bpd" if lacks == "the build" else f"vllm-bpd {expected}"
    assert done.stderr.splitlines()[-1] == (
        f"RuntimeError: speculative method bpd: host {HOST}: vllm-bpd: {found}install {wanted} in "
        "the environment of every node"
    )


class Sent:
    """Leaves for another process as the config does."""

    def __init__(self, version: str, build: str | None) -> None:
        self.version, self.build = version, build

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, (self.version, self.build)


def test_within_one_machine_it_goes_by_name() -> None:
    assert b"vllm_bpd.arrival" in pickle.dumps(arrive)
