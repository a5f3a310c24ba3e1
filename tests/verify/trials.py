"""Long trials of `kvfix verify` on real servers: `python -m tests.verify.trials NAME`. Each run prints a line.

NAME is one of these words:

    connectors   LMCache in process without and with kvfix, LMCache's server, OffloadingConnector, no connector
    faults       every fault of FAULTS, on LMCache in process with kvfix
    partial      prompts whose last chunk is not full, but is stored: a healthy run, and a run with a wrong chunk
    noisy        faults on an engine whose logits have noise
    refusals     a missing API key, a server without /reset_prefix_cache, no hit, a server that ends during the run
    ranks        two ranks: a healthy run, and a run in which one rank loads wrong KV
    lora         a LoRA adapter. Without KVF017, the adapter and the base model share KV
    pd           prefill and decode instances with NIXL: a healthy run, and a run whose transfers return zeros
    healthy N    N healthy runs in bfloat16 while other clients use the server: no run may exit with code 1
"""

import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from kvfix_tools.roundtrip import real_engine
from tests.conftest import Fresh
from tests.engine import start, vllm_server
from tests.engine.vllm_server import CHUNK, FAULTY, IN_PROCESS, OFFLOADING, Server

#: The allowed exit codes of each fault. `one_bit:N` flips bit N of one loaded element. Bits 30 to 23 are the exponent.
FAULTS = {
    "": (0,),
    "two_chunks_swapped": (0, 1),  # only the last bits of an answer differ, because attention adds in another order
    **dict.fromkeys((
        "k_of_two_chunks_swapped", "chunk_of_another_prompt", "chunk_shifted_by_one", "last_chunk_wrong",
        "other_weights:0.05", "other_weights:0.001", "other_adapter:0.1", "one_layer_wrong", "zeros", "only_one_chunk",
        "only_together", "one_bit:30", "one_bit:26", "one_bit:23",
    ), (1,)),
    **{f"one_bit:{bit}": (0, 1, 77) for bit in (19, 15, 11, 8, 4, 0)},
}  # fmt: skip


def verify(*arguments: str) -> tuple[int, str]:
    done = Fresh(1000).run([sys.executable, "-m", "kvfix_tools.cli", "verify", *arguments])
    return done.returncode, done.stdout + done.stderr


def run(name: str, expected: tuple[int, ...], *arguments: str) -> bool:
    began = time.monotonic()
    code, text = verify(*arguments, "--json")
    answer = json.loads(text.splitlines()[-1]) if text else {}
    sizes = [max(each["largest_difference"].values()) for each in answer.get("kinds", {}).values()]
    what = answer.get("reason", f"{answer.get('hit_tokens')} hit tokens, difference {max(sizes, default=0):.3g}")
    right = "right" if code in expected else "WRONG"
    more = f"noise {answer.get('noise', 0):.3g}, {time.monotonic() - began:.0f} s"
    print(f"{right} {name or 'healthy'}: exit {code}, {answer.get('verdict')}, {what}, {more}", flush=True)
    return code in expected


def planted(
    faults: dict[str, tuple[int, ...]],
    folder: Path,
    *arguments: str,
    transfer: dict[str, Any] | None = IN_PROCESS,
    mode: str = "fix",
    options: Sequence[str] = (),
    **environment: str,
) -> bool:
    """Plant these faults in a server, one after the other. Return True if all exit codes are right."""
    print(f"KVFIX={mode!r}, {transfer and transfer['kv_connector']}:", flush=True)
    with Server(Path(tempfile.mkdtemp(dir=folder)), transfer, mode, options, **environment).running() as server:
        results = [plant(server, fault, expected, server.url, *arguments) for fault, expected in faults.items()]
    return all(results)


def plant(server: Server, fault: str, expected: tuple[int, ...], *arguments: str) -> bool:
    server.plant(fault)
    return run(fault, expected, *arguments)


def connectors(folder: Path) -> bool:
    with start.server() as mp:
        cases: list[tuple[str, Any, int]] = [
            ("off", IN_PROCESS, 1), ("fix", IN_PROCESS, 0), ("off", mp, 0), ("off", OFFLOADING, 0), ("off", None, 77),
        ]  # fmt: skip
        results = [planted({"": (code,)}, folder, transfer=transfer, mode=mode) for mode, transfer, code in cases]
    return all(results)


KEY = "KVFIX_TEST_API_KEY"


def refusals(folder: Path) -> bool:
    os.environ[KEY] = "secret"
    key = ("--api-key-env", KEY)
    keyed = Server(folder / "keyed", IN_PROCESS, "fix", ["--api-key", os.environ[KEY]], VLLM_SERVER_DEV_MODE="0")
    with keyed.running() as server:
        results = [run("without the key", (2,), server.url), run("without /reset_prefix_cache", (0,), server.url, *key)]
        threading.Thread(target=kill_within_an_answer, args=(server,)).start()
        results.append(run("ends in the middle", (2,), server.url, *key))
    longer = {**real_engine.in_process(1024), **FAULTY}
    return all(results) & planted({"": (77,)}, folder, transfer=longer)  # no prompt has a whole chunk


def kill_within_an_answer(server: Server) -> None:
    before = server.metric("vllm:request_success_total")
    while server.metric("vllm:request_success_total") < before + 3:
        time.sleep(0.05)
    server.kill()


def lora(folder: Path) -> bool:
    write_adapter(folder / "adapter")
    options = ["--enable-lora", "--lora-modules", f"adapter={folder / 'adapter'}"]
    ways = [("fix", 1), ("fix plus=KVF017", 0)]
    results = [planted({"": (code,)}, folder, "--model", "adapter", mode=mode, options=options) for mode, code in ways]
    return all(results)


def write_adapter(folder: Path) -> None:
    """Write a LoRA adapter of all query and value projections, with weights that change each answer."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    model, rank = real_engine.MODEL, 8
    size = model["hidden_size"]
    widths = {"q_proj": size, "v_proj": size // model["num_attention_heads"] * model["num_key_value_heads"]}
    weights = {}
    for layer in range(model["num_hidden_layers"]):
        for name, width in widths.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(rank, size) / 4
            weights[f"{at}.lora_B.weight"] = torch.randn(width, rank) / 4
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(widths), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def prefill_decode(folder: Path) -> bool:
    faulty = {"kv_connector": "FaultyNixl", "kv_connector_module_path": "kvfix_engine_verify_vllm"}
    with vllm_server.pair(folder, "off", **faulty) as pair:
        # This trial sends few requests, because NIXL polls slowly.
        small = (pair.url, "--decode", pair.decode.url, "--requests", "16", "--seconds", "900")
        results = [plant(pair.decode, fault, (expected,), *small) for fault, expected in (("", 0), ("zeros", 1))]
    return all(results)


def healthy(folder: Path, count: int) -> bool:
    codes: Counter[int] = Counter()
    with Server(folder / "fixed", IN_PROCESS, "fix").running(dtype="bfloat16") as server:
        ended = threading.Event()
        with ThreadPoolExecutor(2) as others:
            for seed in range(2):
                others.submit(other_client, server.url, seed, ended)
            try:
                for number in range(count):
                    code, text = verify(server.url)
                    codes[code] += 1
                    print(number, code, text.splitlines()[-1], dict(codes), flush=True)
            finally:
                ended.set()
    return codes[1] == 0


def other_client(url: str, seed: int, ended: threading.Event) -> None:
    drawn = random.Random(seed)
    while not ended.is_set():
        prompt = [drawn.randrange(256) for _ in range(drawn.randrange(50, 500))]
        vllm_server.ask(url, (prompt, drawn.randrange(1, 30)))
        ended.wait(drawn.random())


NOISY = {
    "": (0, 77), "last_chunk_wrong": (1,), "other_weights:0.05": (1,),
    **{f"one_bit:{bit}": (0, 1, 77) for bit in range(30, 21, -2)},
}  # fmt: skip
PARTIAL = {**IN_PROCESS["kv_connector_extra_config"], "lmcache.save_unfull_chunk": True}
TRIALS: dict[str, Callable[..., bool]] = {
    "connectors": connectors,
    "faults": partial(planted, FAULTS),
    "partial": lambda folder: planted(
        {"": (0,), "last_partial_chunk_wrong": (1,)}, folder, "--chunk", str(CHUNK),
        transfer={**IN_PROCESS, "kv_connector_extra_config": PARTIAL},
    ),
    "noisy": partial(planted, NOISY, KVFIX_TEST_NOISE="0.01"),
    "refusals": refusals,
    "ranks": partial(planted, {"": (0,), "one_rank_wrong": (1,)}, options=["--tensor-parallel-size", "2"]),
    "lora": lora, "pd": prefill_decode, "healthy": healthy,
}  # fmt: skip

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        right = TRIALS[sys.argv[1]](Path(place), *map(int, sys.argv[2:]))
    sys.exit(not right)
