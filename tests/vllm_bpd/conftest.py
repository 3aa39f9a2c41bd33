"""Environment and shared fixtures of the unit tests. Imports no vLLM itself."""

from __future__ import annotations

import os
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports a library that reads them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

# On a busy machine any example may take long.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def fresh_process() -> ForkServerContext:
    """Makes processes that have vLLM imported, once for all of them, and nothing replaced in it.

    Importing vLLM takes seconds; these processes are forked from one that has done it.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.vllm_bpd.fresh"])
    return context
