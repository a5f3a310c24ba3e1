"""Import vLLM, but not LMCache, in the process that fork_server.py forks. Each fork can choose its LMCache release."""

import gc
import importlib

MODULES = [
    "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn", "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.factory", "transformers.models.llama.modeling_llama", "tests.conftest",
]  # fmt: skip

gc.disable()  # without garbage collection, the imports take a third less time
for name in MODULES:
    importlib.import_module(name)
gc.collect()
gc.freeze()  # without freeze(), a garbage collection in a fork visits all objects, and so copies their memory
gc.enable()
