"""`vllm-bpd doctor`: what is installed, what is touched, what fits. Changes nothing."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, entry_points, version

from vllm_bpd import cpu_setup, patches
from vllm_bpd.discovery import find_heads, shipped_names
from vllm_bpd.errors import HeadsError
from vllm_bpd.patching import PatchError, state

_PACKAGES = ("vllm-bpd", "vllm", "torch", "transformers", "safetensors", "triton", "ray")


def examine(target: str | None, heads: str | None) -> int:
    """Print the report; 0 if `bpd` can be served (and heads fit, if a target is given), else 1."""
    print(f"python {platform.python_version()}, {platform.machine()}")
    for name in _PACKAGES:
        print(f"{name} {_version(name)}")
    checks = [_plugin(), _symbols(), _runner()]
    _cpu()
    if target is not None:
        checks.append(_heads(target, heads))
    else:
        print(f"shipped heads: {', '.join(shipped_names()) or 'none'}")
    print("bpd: ready" if all(checks) else "bpd: NOT ready, see the lines marked with !")
    return 0 if all(checks) else 1


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _plugin() -> bool:
    """Whether vLLM will load the plugin in this environment."""
    names = [e.name for e in entry_points(group="vllm.general_plugins") if "vllm_bpd" in e.value]
    if not names:
        print("! plugin: no entry point; install vllm-bpd into vLLM's environment")
        return False
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and names[0] not in allowed.split(","):
        print(
            f"! plugin: VLLM_PLUGINS is {allowed!r}, which leaves out {names[0]!r}; add it, or "
            "unset the variable (vLLM then answers that bpd is unknown, or no JSON)"
        )
        return False
    print(f"plugin: entry point {names[0]}")
    return True


def _symbols() -> bool:
    """Every row of the table, with what was found."""
    try:
        installed = patches.vllm_version()
    except PatchError as error:
        print(f"! {error}")
        return False
    usable_all = True
    for patch in patches.for_release((*patches.ENTRY, *patches.RUNNERS), installed):
        usable, found = state(patch, installed)
        usable_all &= usable
        kind = "wrapped" if patch.replacement else "used"
        note = "ok" if usable else f"expected {patch.expected}, found {found}"
        print(f"{' ' if usable else '!'} {kind} {patch.symbol}: {note} ({patch.why})")
    return usable_all


def _runner() -> bool:
    """Which model runner vLLM would take, as far as can be told without a model."""
    forced = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if forced is not None:
        print(f"model runner: V{2 if forced == '1' else 1} (VLLM_USE_V2_MODEL_RUNNER={forced})")
        return True
    try:
        from vllm.triton_utils import HAS_TRITON
    except ImportError as error:
        print(f"! model runner: vLLM cannot be imported ({error})")
        return False
    print(f"model runner: {'V2 (default)' if HAS_TRITON else 'V1 (no active Triton)'}")
    return True


def _cpu() -> None:
    """Advice where vLLM would run on a CPU; it never makes `bpd` unready."""
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return  # said by _runner
    if current_platform.is_cpu():
        cpu_setup.report()


def _heads(target: str, heads: str | None) -> bool:
    try:
        found = find_heads(target, heads)
    except HeadsError as error:
        print(f"! heads: {error}")
        return False
    config = found.config
    print(
        f"heads: {found.source} ({found.folder}): {config.num_draft_heads} heads (block size "
        f"k = {config.num_draft_heads + 1}), conditioning {config.conditioning}, "
        f"{config.scored_vocab_size} of {config.target.vocab_size} ids scored"
    )
    return True
