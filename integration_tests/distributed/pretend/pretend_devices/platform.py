"""The CPU, which Ray counts as a GPU."""

from typing import Any

from vllm.platforms.cpu import CpuPlatform


class PretendGpuPlatform(CpuPlatform):  # type: ignore[misc]
    """vLLM's CPU platform has no resource that Ray could place a worker by; this one has.

    It leaves asynchronous scheduling as it is on GPUs: model runner V2 has no stages without it.
    """

    ray_device_key = "GPU"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """The CPU's checks, which turn asynchronous scheduling off."""
        scheduler = vllm_config.scheduler_config
        asked = scheduler.async_scheduling
        super().check_and_update_config(vllm_config)
        scheduler.async_scheduling = asked
