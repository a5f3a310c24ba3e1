"""Import all modules of vLLM that an engine and the lab need, but not LMCache. Tests run in forks of this process.

Without the garbage collector the imports take a third less time. After `gc.freeze`, the garbage collector of a fork
does not visit the imported objects, and so does not copy their memory.
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
