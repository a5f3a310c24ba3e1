"""A platform plugin of the test suite: vLLM's CPU platform, with a resource name so that Ray can place its workers.

vLLM refuses Ray on the CPU because its platform names no resource of Ray (`ray_device_key`, ray_utils.py 0.32.0:572).
This platform names "GPU", because a Ray cluster may declare any number of GPUs. All other parts are vLLM's own.
"""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """vLLM uses this platform if the environment has KVFIX_TEST_RAY."""

    ray_device_key = "GPU"
