"""Test only: what vLLM asks of a GPU machine before it starts workers, answered by a CPU.

With the folder above on PYTHONPATH, vLLM finds this platform in every process. Workers of an
executor are processes of their own, so nothing that one process patches would reach them.
"""


def platform() -> str:
    """The platform's class, for vLLM's `vllm.platform_plugins`."""
    return "pretend_devices.platform.PretendGpuPlatform"
