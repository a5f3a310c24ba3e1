"""A user's program: apply kvfix, start vLLM, generate. Run as `python serve.py JOB.json`; it writes the job's `out`.

Everything of kvfix that the user does stands in this file, and only in the parent process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


def main(job: dict[str, Any]) -> None:
    if job["apply"]:
        import kvfix

        kvfix.apply(job["apply"])
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    folder = Path(job["model"])
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    transfer = KVTransferConfig(**job["transfer"]) if job["transfer"] else None
    llm = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        seed=0,
        block_size=32,
        disable_log_stats=False,
        kv_transfer_config=transfer,
        **job["engine"],
    )
    rounds = []
    for number, prompts in enumerate(job["rounds"]):
        if number == job["abort_before"]:
            abort_waiting(llm.llm_engine, job["abort"])
        if number == job["spoil_from"]:
            Path(job["spoil"]).touch()
        parameters = [
            SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=tokens) for _, tokens in prompts
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in prompts], parameters, use_tqdm=False)
        rounds.append([list(output.outputs[0].token_ids) for output in outputs])
        llm.reset_prefix_cache()
    ask_for_recorders(Path(os.environ["KVFIX_DUMP_DIR"]))
    preemptions = sum(
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:num_preemptions" and hasattr(metric, "value")
    )
    Path(job["out"]).write_text(json.dumps({"rounds": rounds, "preemptions": preemptions}))


def ask_for_recorders(folder: Path) -> None:
    """As `kvfix dump` does: vLLM kills its processes at the end, and they would leave nothing."""
    ready = [int(path.stem.rpartition("-")[2]) for path in folder.glob("*.ready")]
    for pid in ready:
        os.kill(pid, signal.SIGUSR2)
    until = time.monotonic() + 30
    while len(list(folder.glob("*-signal.jsonl"))) < len(ready) and time.monotonic() < until:
        time.sleep(0.05)


def abort_waiting(engine: Any, job: dict[str, Any]) -> None:
    """One request runs, another waits behind it and is aborted; the first one runs to its end."""
    from vllm import SamplingParams

    def add(name: str, **more: Any) -> None:
        prompt, tokens = job[name]
        parameters = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=tokens, **more)
        engine.add_request(name, {"prompt_token_ids": prompt}, parameters)

    add("running")
    for _ in range(4):
        engine.step()
    add("waiting", extra_args=job["extra_args"])
    for _ in range(4):  # each is a step of the scheduler at least
        engine.step()
    engine.abort_request(["waiting"])
    while engine.has_unfinished_requests():
        engine.step()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
