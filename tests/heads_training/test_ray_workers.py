"""What workers of Ray are given, asked of the cluster and not of the process that starts them."""

from __future__ import annotations

import pytest

from heads_training.ray_workers import use_gpus
from vllm_bpd.errors import HeadsError


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({"CPU": 64.0, "GPU": 8.0}, True),
        ({"CPU": 64.0, "GPU": 16.0}, True),
        ({"CPU": 64.0}, False),
        ({"CPU": 64.0, "GPU": 0.0}, False),
    ],
)
def test_workers_get_the_clusters_gpus(resources: dict[str, float], expected: bool) -> None:
    assert use_gpus(resources, 8) is expected


def test_too_few_gpus_are_refused_and_not_replaced_by_cpus() -> None:
    with pytest.raises(HeadsError, match=r"ray_workers: found 8 on a cluster with 4 GPUs; "):
        use_gpus({"CPU": 64.0, "GPU": 4.0}, 8)
