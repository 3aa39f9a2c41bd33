"""What doctor says of a CPU machine's set-up."""

from __future__ import annotations

import pytest

from vllm_bpd import cpu_setup
from vllm_bpd.cpu_setup import advice

LIBRARIES = "7f00 r-xp /x/lib/libiomp5.so\n7f10 r-xp /usr/lib/libtcmalloc_minimal.so.4\n"


def test_nothing_to_say_where_all_is_in_place() -> None:
    lines = advice(LIBRARIES, {"VLLM_CPU_KVCACHE_SPACE": "2"}, cores=4)
    assert not [line for line in lines if line.startswith("~")]
    assert lines[2:] == [
        "cpu: KV cache: 2 GiB (VLLM_CPU_KVCACHE_SPACE)",
        "cpu: threads: 4 of 4 cores (VLLM_CPU_OMP_THREADS_BIND auto)",
    ]


@pytest.mark.parametrize(
    ("libraries", "environment", "place", "said"),
    [
        ("", {}, 0, "Intel OpenMP: not loaded"),
        ("libiomp5", {}, 1, "tcmalloc: not loaded"),
        (LIBRARIES, {}, 2, "KV cache: as large as vLLM guesses"),
        (LIBRARIES, {"OMP_NUM_THREADS": "1"}, 3, "OMP_NUM_THREADS is 1 of 4 cores"),
    ],
)
def test_each_thing_missing_is_marked_with_its_remedy(
    libraries: str, environment: dict[str, str], place: int, said: str
) -> None:
    line = advice(libraries, environment, cores=4)[place]
    assert line.startswith("~ cpu: ")
    assert said in line


def test_the_report_reads_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert "libpython" in cpu_setup.loaded_libraries() or "python" in cpu_setup.loaded_libraries()
    cpu_setup.report()
    assert len(capsys.readouterr().out.splitlines()) == 4
