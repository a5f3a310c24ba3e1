"""vLLM's CPU platform, as a platform plugin of the test suite that Ray can place.

vLLM refuses Ray on the CPU because its platform names no resource of Ray (`ray_device_key`, ray_utils.py 0.32.0:572).
Here the key is "GPU", because a Ray cluster may declare any number of GPUs. Executor, actors and worker are vLLM's own.
"""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """The platform if the environment has KVFIX_TEST_RAY."""

    ray_device_key = "GPU"
