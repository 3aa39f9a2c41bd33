"""The CPU, which Ray counts as a GPU."""

from vllm.platforms.cpu import CpuPlatform


class PretendGpuPlatform(CpuPlatform):  # type: ignore[misc]
    """vLLM's CPU platform has no resource that Ray could place a worker by; this one has."""

    ray_device_key = "GPU"
