"""Give vLLM's CPU platform a device name for Ray. Without a name, vLLM refuses Ray (ray_utils.py 0.32.0:572)."""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """vLLM uses this platform if the environment has KVFIX_TEST_RAY. The tests' Ray nodes declare nonexistent GPUs."""

    ray_device_key = "GPU"
