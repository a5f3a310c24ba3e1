"""The imports of the process that tests are forked from: all modules of vLLM for an engine and the lab, without
LMCache.

The garbage collector is off: it takes a third of the time, and in a fork it would copy all of this memory.
"""

import gc
import importlib

MODULES = [
    "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn", "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.factory", "transformers.models.llama.modeling_llama", "tests.conftest",
]  # fmt: skip

gc.disable()
for name in MODULES:
    importlib.import_module(name)
gc.collect()
gc.freeze()
gc.enable()
