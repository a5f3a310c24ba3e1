"""A real vLLM engine on a model made up here, and LMCache's connectors for it: how they are set up, in one place.

The backend `engine` runs them, and so do the tests of the fixes (tests/engine).
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from typing import Any

#: A small model. Its weights are drawn (weights()).
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
BLOCK = 32  # vLLM's attention for the CPU wants a multiple of 32
#: Of the engine's processes, and of the server's.
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # else scheduler and worker hash differently, and nothing is ever found
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
}
READY = "LMCache cache server is running"
#: Of the newest LMCache's server: it takes what the worker has.
ANY_MODE = ("--supported-transfer-mode", "auto")
#: Seconds for the server to be there.
SERVER_LIMIT = 180


def prompt(tokens: int, seed: int) -> list[int]:
    return [(seed * 101 + position * 7 + position // 97) % 509 + 1 for position in range(tokens)]


def make(model: Path, transfer: dict[str, Any] | None, dtype: str = "float32", **more: Any) -> Any:
    """An LLM on that model, whose folder is made here. more: further arguments of LLM."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({**MODEL, "torch_dtype": dtype}))
    weights(model / "model.safetensors")
    return LLM(
        model=str(model), skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, seed=0,
        block_size=BLOCK, disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None, **more,
    )  # fmt: skip


def weights(file: Path) -> None:
    """Drawn with a variance that makes attention count. vLLM's own dummy weights, of 0.001 at most, do not: with them
    the last token alone decides, and an engine that loads anything at all gives the right answers."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, words = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["vocab_size"]
    queries, keys = (MODEL["head_dim"] * MODEL[f"num_{which}_heads"] for which in ("attention", "key_value"))
    of_layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layers = [f"model.layers.{number}" for number in range(MODEL["num_hidden_layers"])]
    shapes = {f"{layer}.{name}": shape for layer in layers for name, shape in of_layer.items()}
    chance = torch.Generator().manual_seed(0)
    held = {
        f"{name}.weight": torch.randn(shape, generator=chance) * 2 / shape[1] ** 0.5
        for name, shape in {**shapes, "lm_head": (words, hidden)}.items()
    }
    held["model.embed_tokens.weight"] = torch.randn(words, hidden, generator=chance)
    norms = [f"{layer}.{name}_layernorm" for layer in layers for name in ("input", "post_attention")]
    held.update({f"{name}.weight": torch.ones(hidden) for name in (*norms, "model.norm")})
    save_file(held, file)


def greedy(tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=tokens, **more)


def in_process(chunk: int, **settings: Any) -> dict[str, Any]:
    """kv_transfer_config for LMCache in the engine's own processes. settings: more of LMCache's."""
    every = {
        "chunk_size": chunk,
        "local_cpu": True,
        "max_local_cpu_size": 0.2,
        "save_unfull_chunk": False,
        # The default hashes None, whose hash is an address before Python 3.12: scheduler and worker never agree.
        "pre_caching_hash_algorithm": "sha256_cbor",
        **settings,
    }
    extra = {f"lmcache.{name}": value for name, value in every.items()}
    return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@contextlib.contextmanager
def server(
    log: Path, chunk: int, environment: dict[str, str], start: tuple[str, ...] = (), mode: tuple[str, str] = ANY_MODE
) -> Iterator[dict[str, Any]]:
    """A real `lmcache server`; kv_transfer_config for the multi-process connector with it. start: in front of it."""
    program = shutil.which("lmcache", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        raise FileNotFoundError("the program lmcache is not on PATH")
    port, http = free_port(), free_port()
    command = [*start, program, "server", "--port", str(port), "--http-port", str(http), "--chunk-size", str(chunk)]
    command += ["--l1-size-gb", "0.5", "--eviction-policy", "LRU", *mode]
    with open(log, "w") as said:
        process = subprocess.Popen(
            [*command, "--disable-observability"], env={**environment, **ENVIRONMENT}, stdout=said, stderr=said
        )
    try:
        if not wait_for(READY, log, process, SERVER_LIMIT):
            raise RuntimeError(f"the lmcache server is not there: ... {log.read_text()[-1500:]}")
        extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
        yield {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        process.kill()
        process.wait()


def run(
    command: list[str],
    environment: dict[str, str],
    log: Path,
    limit: float,
    while_it_runs: Callable[..., Any] | None = None,
) -> tuple[int | None, str, int]:
    """(exit code, or None after so many seconds; all it said; pid). while_it_runs: called with the process."""
    with open(log, "w+") as said:
        process = subprocess.Popen(
            command,
            env={**environment, **ENVIRONMENT},
            stdout=said,
            stderr=said,
            cwd=log.parent,
            start_new_session=True,
        )
        code: int | None = None
        try:
            if while_it_runs is not None:
                while_it_runs(process)
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            pass
        finally:  # an engine that fails to start leaves its processes behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return code, said.read(), process.pid


def wait_for(text: str, log: Path, process: subprocess.Popen[Any], limit: float) -> bool:
    """Until the text is in the log; False if the process ends before, or the seconds do."""
    until = time.monotonic() + limit
    while text not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def free_port() -> int:
    """One below those that the kernel hands to outgoing connections: it is still free when a server gets to it."""
    while True:
        port = random.randrange(20000, 32768)
        with socket.socket() as taken, contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port
