"""How a `bpd` config arrives in another process, maybe on a node without this plugin.

An engine on Ray sends this module's code along with the config (`send_by_value`). So nothing here
may need the rest of the package before `arrive` has found it.
"""

from __future__ import annotations

import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def plugin_version() -> str:
    """This process's vllm-bpd, or `none`."""
    try:
        return version("vllm-bpd")
    except PackageNotFoundError:
        return "none"


def arrive(expected: str) -> object:
    """The config that this process is being sent, still empty, if its plugin is `expected`.

    Raises RuntimeError, one line that names the host, if vllm-bpd is missing here or another
    version (HeadsError is the package's, so it may be missing, too).
    """
    where = f"speculative method bpd: host {socket.gethostname()}"
    advice = f"install vllm-bpd {expected} in the environment of every node"
    found = plugin_version()
    if found != expected:
        raise RuntimeError(
            f"{where}: vllm-bpd: found {found}; the front end has {expected}; {advice}"
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
