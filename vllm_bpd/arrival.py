"""How a `bpd` config arrives in another process, maybe on a node without this plugin.

An engine on Ray sends this module's code along with the config (`send_by_value`). So nothing here
may need the rest of the package before `arrive` has found it; and nothing may be kept in a global
or a cache here, which would travel too and answer for the other node.
"""

from __future__ import annotations

import hashlib
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def plugin_version() -> str:
    """This process's vllm-bpd, or `none`."""
    try:
        return version("vllm-bpd")
    except PackageNotFoundError:
        return "none"


def plugin_build() -> str | None:
    """sha256 over the sources of this process's vllm-bpd, or None where there are none to read.

    Two commits have one version number, and people install from clones.
    """
    spec = find_spec("vllm_bpd")
    digest = hashlib.sha256()
    found = False
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
            found = True
    return digest.hexdigest() if found else None


def arrive(expected: str, build: str | None = None) -> object:
    """The config that this process is being sent, still empty, if its plugin is `expected`.

    Raises RuntimeError, one line that names the host, if vllm-bpd is missing here, another version
    or, with a `build`, of other sources (HeadsError is the package's, so it may be missing, too).
    """
    where = f"speculative method bpd: host {socket.gethostname()}"
    advice = f"install vllm-bpd {expected} in the environment of every node"
    found = plugin_version()
    if found != expected:
        raise RuntimeError(
            f"{where}: vllm-bpd: found {found}; the front end has {expected}; {advice}"
        )
    try:
        import vllm_bpd  # noqa: F401
    except ModuleNotFoundError as error:
        raise RuntimeError(f"{where}: vllm-bpd: not importable ({error}); {advice}") from None
    here = plugin_build()
    if build is not None and here is not None and here != build:
        raise RuntimeError(
            f"{where}: vllm-bpd: found build {here[:12]}; the front end has build {build[:12]}; "
            f"both are {expected}: install the same commit of vllm-bpd in the environment of every "
            "node"
        )
    try:
        from vllm_bpd.speculative import BpdSpeculativeConfig
    except ModuleNotFoundError as error:
        raise RuntimeError(f"{where}: vllm-bpd: not importable ({error}); {advice}") from None
    config: object = BpdSpeculativeConfig.__new__(BpdSpeculativeConfig)
    return config


def send_by_value() -> None:
    """Let Ray send this module's code, not its name."""
    from ray import cloudpickle

    register: Any = cloudpickle.register_pickle_by_value  # Ray leaves it without types
    register(sys.modules[__name__])
