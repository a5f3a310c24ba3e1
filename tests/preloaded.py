"""Import all modules of vLLM that an engine and the lab need, but not LMCache. Tests run in forks of this process."""

import gc
import importlib

MODULES = [
    "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn", "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.factory", "transformers.models.llama.modeling_llama", "tests.conftest",
]  # fmt: skip

gc.disable()  # the imports then take a third less time
for name in MODULES:
    importlib.import_module(name)
gc.collect()
gc.freeze()  # otherwise a garbage collection in a fork visits these objects, and so copies their memory
gc.enable()
