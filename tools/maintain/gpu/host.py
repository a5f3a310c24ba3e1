"""Stage `host`: show the releases and the device, and import vLLM, its compiled operations and LMCache."""

import importlib
import platform
import subprocess
import sys
import time
from importlib.metadata import distributions

from maintain.gpu import stages

DISTS = ("triton", "vllm", "lmcache", "kvfix", "transformers")
MODULES = (
    "vllm.v1.worker.gpu_worker", "vllm.v1.attention.backends.triton_attn", "vllm.entrypoints.openai.api_server",
    "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector", "lmcache.integration.vllm.vllm_v1_adapter",
    "lmcache.integration.vllm.vllm_multi_process_adapter", "lmcache.v1.multiprocess.server",
)  # fmt: skip
#: vLLM's compiled operations are linked with the GPU driver, so their import needs the driver.
WITH_DRIVER = "vllm._C_stable_libtorch"


def main(arguments: list[str]) -> int:
    import torch

    done, cuda = stages.Steps(), torch.cuda.is_available()
    releases = ", ".join(sorted({f"{each.name} {each.version}" for each in distributions() if each.name in DISTS}))
    date = time.strftime("%Y-%m-%d", time.gmtime())
    done.add("releases", True, f"Python {platform.python_version()}, torch {torch.__version__}, {releases}; {date}")
    if cuda:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        done.add("device", True, f"{torch.cuda.get_device_name()}, driver {driver}, {torch.cuda.device_count()} GPU")
    for module in (*MODULES, *([WITH_DRIVER] if cuda else [])):
        start = time.monotonic()
        try:
            importlib.import_module(module)
            done.add(module, True, f"imported in {time.monotonic() - start:.0f} s")
        except Exception as error:  # noqa: BLE001 - any exception is reported
            done.add(module, False, f"{type(error).__name__}: {error}")
    stages.device(arguments)
    return done.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
