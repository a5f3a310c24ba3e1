"""vLLM's CPU platform, as a platform plugin of the test suite that Ray can place.

vLLM refuses Ray on the CPU because its platform names no resource of Ray (`ray_device_key`, ray_utils.py 0.32.0:572).
Here it is "GPU", of which a cluster has as many as one says. All else is vLLM's own: executor, actors, worker.
"""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """Chosen where the environment has KVFIX_TEST_RAY."""

    ray_device_key = "GPU"
