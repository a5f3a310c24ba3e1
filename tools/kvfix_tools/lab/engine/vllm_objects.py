"""Make the real vLLM scheduler with a real connector, without model, GPU or sockets.

The module supports vLLM 0.11.2 and later. The code inspects vLLM's objects, not the version, to find differences
between releases. Importing this module imports vLLM, which takes 15 seconds or more.
"""

import copy
import functools
import json
import mmap
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch
from vllm import config as configs
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvfix_tools.lab.connectors.connector import OtherConnector, no_sockets
from kvfix_tools.lab.engine.kv_layout import kv_cache, page_bytes
from kvfix_tools.lab.engine.memory import VOCABULARY
from kvfix_tools.lab.options import KNOWN, PAIRS, Options
from kvfix_tools.lab.releases import accepted

_MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 1 << 20, "torch_dtype": "float32",
}  # fmt: skip
_init_none_hash = functools.cache(init_none_hash)
#: True if sampled tokens are arrays, as in vLLM 0.11.
_ARRAYS = "ndarray" in str(ModelRunnerOutput.__annotations__["sampled_token_ids"])


def sampled(tokens: list[list[int]]) -> list[Any]:
    """Return sampled tokens per request in the type that ModelRunnerOutput of this release expects."""
    return [numpy.array(each, dtype=numpy.int64) for each in tokens] if _ARRAYS else tokens


def preempt(scheduler: Scheduler, request: Request, timestamp: float) -> None:
    """Call Scheduler._preempt_request. If vLLM lacks this method (0.11), preempt as Scheduler.schedule does."""
    if hasattr(scheduler, "_preempt_request"):
        scheduler._preempt_request(request, timestamp)
        return
    scheduler.kv_cache_manager.free(request)
    scheduler.encoder_cache_manager.free(request)
    request.status = RequestStatus.PREEMPTED
    request.num_computed_tokens = 0
    request.num_preemptions += 1
    scheduler.waiting.prepend_request(request)


@functools.cache
def _model(kv_heads: int) -> configs.ModelConfig:
    """Return the configuration of a model. The scheduler needs only the shape of the model, and no weights."""
    with tempfile.TemporaryDirectory(prefix="kvfix-lab-") as folder:
        heads = {"num_key_value_heads": kv_heads, "num_attention_heads": max(kv_heads, _MODEL["num_attention_heads"])}
        Path(folder, "config.json").write_text(json.dumps({**_MODEL, **heads}))
        return configs.ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", seed=0)


def _speculative(options: Options, model: configs.ModelConfig) -> configs.SpeculativeConfig | None:
    """Make a configuration for ngram, which needs no draft model. Then set the method to `options.drafter`."""
    if not options.drafter:
        return None
    config = configs.SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=options.drafts,
        target_model_config=model,
        target_parallel_config=configs.ParallelConfig(),
    )
    config.method = options.drafter
    if options.drafter == "mtp":
        config.draft_model_config = copy.copy(model)
        config.draft_model_config.hf_config = copy.copy(model.hf_config)
        config.draft_model_config.hf_config.num_nextn_predict_layers = options.drafts
    return config


def _connector(name: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _offloading(options: Options, folder: str = "") -> dict[str, Any]:
    """Return the settings of OffloadingConnector. The CPU has about `cpu_blocks` blocks (0: as many as the GPU).

    By default a chunk has one or two blocks. A chunk fills whole memory pages. folder: root directory of a file tier.
    """
    blocks = 2 if options.chunk_size // options.block_size % 2 == 0 else 1
    extra = {"blocks_per_chunk": blocks, **({} if options.connector in PAIRS else options.extra)}
    chunk = -(-extra["blocks_per_chunk"] * page_bytes(options) * options.ranks // mmap.PAGESIZE) * mmap.PAGESIZE
    chunks = max(1, (options.cpu_blocks or options.num_blocks) // extra["blocks_per_chunk"])
    extra["cpu_bytes_to_use"] = chunks * chunk
    if options.tier:
        files = {"root_dir": folder, "n_read_threads": 1, "n_write_threads": 1} if options.tier == "fs" else {}
        extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": options.tier, **files}]}
    return _connector("OffloadingConnector", extra)


def _simple_offloading(options: Options) -> dict[str, Any]:
    """Return the settings of SimpleCPUOffloadConnector. The CPU has `cpu_blocks` blocks (0: as many as the GPU)."""
    memory = max(2, options.cpu_blocks or options.num_blocks) * page_bytes(options) * options.ranks
    return _connector("SimpleCPUOffloadConnector", {"cpu_bytes_to_use": memory, **options.extra})


def vllm_config(options: Options, folder: str = "") -> configs.VllmConfig:
    """Return the configuration that `vllm serve` would make. folder: directory for files of the connector."""
    cache = configs.CacheConfig(block_size=options.block_of_rank, enable_prefix_caching=options.prefix_caching)
    cache.num_gpu_blocks = options.num_blocks
    extra: dict[str, Any] = {"lmcache.chunk_size": options.chunk_size}
    extra |= {f"lmcache.{name}": value for name, value in options.lmcache.items()}
    if options.any_connector:
        extra = copy.deepcopy(options.config)
    if options.lmcache.get("enable_async_loading"):
        # Async loading needs save_unfull_chunk=False. LMCache 0.3.10 sets False only for its own file or environment.
        extra.setdefault("lmcache.save_unfull_chunk", False)
    module, _, name = options.connector.rpartition(":")
    if options.connector in KNOWN:
        name, module = KNOWN[options.connector].name, KNOWN[options.connector].module or ""
    transfer: dict[str, Any] = {
        "kv_connector": name,
        "kv_connector_module_path": module or None,
        "kv_role": options.kv_role,
        "kv_connector_extra_config": options.extra if options.connector in PAIRS else extra,
        # vLLM before 0.13 lacks this option, and recomputes the tokens of a failed load
        **accepted(configs.KVTransferConfig, kv_load_failure_policy=options.kv_load_failure_policy),
    }
    if options.connector == "offloading":
        transfer |= _offloading(options, folder)
    elif options.connector == "simple-offload":
        transfer |= {**_simple_offloading(options), "kv_role": options.kv_role}
    children = [transfer]
    if options.beside:
        other = _connector(OtherConnector.__name__, {})
        children.insert(0, {**other, "kv_connector_module_path": OtherConnector.__module__})
    if options.offloading:
        offloading = _simple_offloading(options) if options.simple_offloading else _offloading(options)
        children.insert(0 if options.offloading == "first" else len(children), offloading)
    if options.multi:
        children.insert(0 if options.lmcache_first else 1, _connector("LMCacheConnectorV1", extra))
    if len(children) > 1:
        multi = _connector("MultiConnector", {"connectors": children})
        transfer = {**transfer, **multi, "kv_connector_module_path": None, "kv_role": transfer["kv_role"]}
    # All engines share one model name, because LMCache never frees the metrics of a model name.
    model = copy.copy(_model(options.kv_heads))
    model.max_model_len = options.max_model_len
    config = configs.VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=configs.SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=options.async_scheduling,
            policy=options.policy,
            disable_hybrid_kv_cache_manager=True,
            # old versions of vLLM lack this option, and work as if it were false
            **accepted(configs.SchedulerConfig, scheduler_reserve_full_isl=options.reserve_full_isl),
        ),
        device_config=configs.DeviceConfig("cpu"),
        kv_transfer_config=configs.KVTransferConfig(**transfer),
    )
    # vLLM's CPU platform turns asynchronous scheduling off, and refuses the hybrid KV cache manager
    config.scheduler_config.async_scheduling = options.async_scheduling
    config.scheduler_config.disable_hybrid_kv_cache_manager = not options.several_groups
    if options.states:  # vLLM sets these options for models that it knows (model_executor/models/config.py)
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.mamba_block_size = options.block_size
    config.speculative_config = _speculative(options, model)  # vLLM refuses some drafters on a CPU
    config.parallel_config.world_size = options.ranks
    config.parallel_config.tensor_parallel_size = 1 if options.pipeline else options.ranks
    config.parallel_config.pipeline_parallel_size = options.ranks if options.pipeline else 1
    config.parallel_config.decode_context_parallel_size = options.ranks if options.context else 1
    return config


def of_rank(config: configs.VllmConfig, rank: int) -> configs.VllmConfig:
    own = copy.copy(config)
    own.parallel_config = copy.copy(config.parallel_config)
    own.parallel_config.rank = rank
    return own


def worker(options: Options, config: configs.VllmConfig) -> Any:
    return KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache(options, config))


def scheduler(options: Options, config: configs.VllmConfig) -> Scheduler:
    """Return the real scheduler. Its attribute `connector` is the connector in the scheduler role."""
    kind = AsyncScheduler if options.async_scheduling else Scheduler
    with no_sockets():
        made = kind(
            vllm_config=config,
            kv_cache_config=kv_cache(options, config),
            structured_output_manager=StructuredOutputManager(config),
            # a multiple of the block sizes of all KV groups; vLLM hashes blocks of the smallest size
            block_size=options.block_size * (options.window_blocks if options.windows else 1),
            **(accepted(Scheduler, hash_block_size=options.block_size) if options.several_groups else {}),
        )
    made.use_v2_model_runner = options.model_runner_v2  # vLLM sets this attribute only with Triton
    return made


def request(
    options: Options,
    name: str,
    prompt: list[int] | None,
    max_tokens: int,
    sampling: dict[str, Any] | None = None,
    lora: str = "",
    embeddings: tuple[int, float] | None = None,
    **more: Any,
) -> Request:
    """Return a request as EngineCore makes it. sampling: arguments of SamplingParams. more: arguments of Request.

    lora: name of the LoRA adapter. embeddings: (number of tokens, value of all elements), used instead of a prompt.
    """
    _init_none_hash(sha256)
    parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, **(sampling or {}))
    parameters.update_from_generation_config({}, 0)
    if lora:
        more["lora_request"] = LoRARequest(lora, len(lora), lora)
    if embeddings:
        tokens, element = embeddings
        more["prompt_embeds"] = torch.full((tokens, _MODEL["hidden_size"]), element)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=parameters,
        pooling_params=None,
        block_hasher=get_request_block_hasher(options.block_size, sha256),
        **accepted(Request, eos_token_id=0),  # later releases take this id only from the sampling parameters
        **more,
    )
