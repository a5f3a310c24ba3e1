"""Name a resource for Ray on vLLM's CPU platform. Without the name vLLM refuses Ray there (ray_utils.py 0.32.0:572)."""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """vLLM uses this platform if the environment has KVFIX_TEST_RAY. A Ray cluster may declare any number of GPUs."""

    ray_device_key = "GPU"
