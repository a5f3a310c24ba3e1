"""Run a real vLLM engine with a small model of random weights. `run` starts the program that makes the engine."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

Json = dict[str, Any]
MODEL: Json = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
BLOCK = 32  # tokens of a block. vLLM's attention for the CPU needs a multiple of 32
#: Environment variables of the engine's processes and of the LMCache server.
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # else the hashes of scheduler and worker differ, and no lookup has a hit
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # One thread is enough for the small model. More threads would occupy cores that other processes need.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
}
#: Arguments of LLM on a GPU. Triton attention supports float32. In bfloat16, an answer sometimes depends on how vLLM
#: splits the prompt. The memory limits let several engines share one GPU.
ON_CUDA = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 28}
READY = "LMCache cache server is running"
#: Options that let the server of the newest LMCache accept any transfer mode of the worker.
ANY_MODE = ("--supported-transfer-mode", "auto")
#: Maximum seconds until the last stores end and vLLM frees their blocks. A store ends only in an engine step.
STORING = 20
SERVER_LIMIT = 180  # maximum seconds until the server is ready


def prompt(tokens: int, seed: int) -> list[int]:
    return [(seed * 101 + position * 7 + position // 97) % 509 + 1 for position in range(tokens)]


def make(model: Path, transfer: Json | None, dtype: str = "float32", config: Json | None = None, **more: Any) -> Any:
    """Write a model to the folder `model`, and make an LLM with it. config: overrides MODEL. more: arguments of LLM."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    write_model(model, dtype, config or {})
    return LLM(
        model=str(model), skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, seed=0,
        block_size=BLOCK, disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None, **more,
    )  # fmt: skip


def write_model(folder: Path, dtype: str, config: Json) -> None:
    """Write a model. Its random weights are larger than vLLM's dummy weights, so that wrong KV changes the answers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**MODEL, "initializer_range": 0.125, **config}))
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a token for each byte, so that vLLM accepts prompts as text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def greedy(tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=tokens, **more)


def generate(engine: Any, requests: list[tuple[list[int], int]]) -> list[list[int]]:
    """Run requests (prompt, tokens to generate) greedily, empty the prefix cache, and return the answers."""
    prompts = [{"prompt_token_ids": tokens} for tokens, _ in requests]
    outputs = engine.generate(prompts, [greedy(tokens) for _, tokens in requests], use_tqdm=False)
    client = engine.llm_engine.engine_core
    until = time.monotonic() + STORING
    while not engine.reset_prefix_cache() and time.monotonic() < until:
        if hasattr(client, "engine_core"):  # an engine in this process runs a step only in this call
            client.get_output()
        time.sleep(0.01)
    return [list(output.outputs[0].token_ids) for output in outputs]


def counter(engine: Any, name: str) -> int:
    return sum(int(metric.value) for metric in engine.get_metrics() if metric.name == name)


def in_process(chunk: int, **settings: Any) -> Json:
    """Return kv_transfer_config for LMCache inside the engine's processes. settings: more settings of LMCache."""
    every = {
        "chunk_size": chunk,
        "local_cpu": True,
        "max_local_cpu_size": 0.2,
        "save_unfull_chunk": False,
        # The default algorithm hashes None. Before Python 3.12, the hash of None differs between scheduler and worker.
        "pre_caching_hash_algorithm": "sha256_cbor",
        **settings,
    }
    extra = {f"lmcache.{name}": value for name, value in every.items()}
    return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@contextmanager
def server(
    log: Path, chunk: int, environment: dict[str, str], start: tuple[str, ...] = (), options: tuple[str, ...] = ANY_MODE
) -> Iterator[Json]:
    """Run `lmcache server`, and yield a kv_transfer_config with the server's port. start: words before the command."""
    program = shutil.which("lmcache", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        raise FileNotFoundError("the program lmcache is not on PATH")
    port, http = free_port(), free_port()
    command = [*start, program, "server", "--port", str(port), "--http-port", str(http), "--chunk-size", str(chunk)]
    command += ["--l1-size-gb", "0.5", "--eviction-policy", "LRU", *options]
    with started([*command, "--disable-observability"], log, environment) as process:
        if not wait_for(READY, log, process, SERVER_LIMIT):
            raise RuntimeError(f"the lmcache server did not start: ... {log.read_text()[-1500:]}")
        extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
        try:
            yield {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)


@contextmanager
def started(
    command: list[str], log: Path, environment: dict[str, str], popen: Any = subprocess.Popen, **more: Any
) -> Iterator[Any]:
    """Start a program in a process group of its own. At the end, kill this group. popen: replaces subprocess.Popen."""
    settings = {**environment, **ENVIRONMENT}
    with open(log, "wb") as file:
        process = popen(command, env=settings, stdout=file, stderr=file, start_new_session=True, **more)
    try:
        yield process
    finally:  # an engine that fails to start leaves processes behind
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Ended(NamedTuple):
    code: int | None  # None if kvfix killed the program after the time limit
    answer: Any  # None if the program wrote no answer
    log: str  # output of the program and of its child processes
    pid: int


def run(
    program: list[str],
    job: Json,
    folder: Path,
    environment: dict[str, str],
    limit: float,
    while_it_runs: Callable[[Any], None] | None = None,
    popen: Callable[..., Any] = subprocess.Popen,
) -> Ended:
    """Run a Python program, and pass it a file with `job` and the paths `model` and `out`. limit: time in seconds."""
    out = folder / "out.json"
    (folder / "job.json").write_text(json.dumps({**job, "model": str(folder / "model"), "out": str(out)}))
    code, log, command = None, folder / "log", [sys.executable, *program, str(folder / "job.json")]
    with started(command, log, environment, popen, cwd=folder) as process, suppress(subprocess.TimeoutExpired):
        if while_it_runs is not None:
            while_it_runs(process)
        code = process.wait(timeout=limit)
    answer = json.loads(out.read_text()) if out.exists() else None
    return Ended(code, answer, log.read_text(errors="replace"), process.pid)


def wait_for(text: str, log: Path, process: subprocess.Popen[Any], limit: float) -> bool:
    """Wait until the text is in the log. Return False if the process ends or the time is over."""
    until = time.monotonic() + limit
    while text not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def free_port() -> int:
    """Return a free port below the range from which the kernel takes ports for outgoing connections."""
    while True:
        port = random.randrange(20000, 32768)
        with socket.socket() as taken, suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port
