"""In a real engine with async scheduling, a load fails while the next step is in flight (KVF205, KVF007, KVF203).

start.py also runs this file as a program, so that a case can add a request between two steps. A load fails because the
program removes chunks from LMCache's memory after the lookup. The program also fills the request's blocks with random
numbers, because old blocks of a small engine could still have the right KV.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import kvfix
from kvfix_tools.roundtrip import cuda_stand_in, real_engine
from kvfix_tools.roundtrip.real_engine import prompt
from tests.engine import start
from tests.engine.start import Ran

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOKENS = 12
#: LMCache has the first 192 tokens of a prompt before the request comes. 192 tokens are three chunks or six blocks.
HIT = 192
JOB: dict[str, Any] = {
    "program": Path(__file__).name,
    "engine": {
        "max_model_len": 1024, "num_gpu_blocks_override": 129, "max_num_batched_tokens": 384,
        "long_prefill_token_threshold": 256,  # so that the step has tokens left for the request `sharer`
    },
    "environment": start.ONE_PROCESS, "mode": "check",
}  # fmt: skip


class Case(NamedTuple):
    """A request whose load fails, and the expected results. load: prompt of the request."""

    load: list[int]
    again: dict[str, int]  # tokens that LMCache loads for each request when the test sends the prompt again
    steps: list[dict[str, int]] = []  # tokens of each request in the step whose load fails, and in the next step
    #: Requests whose answer is wrong without kvfix, in the first run and when the test sends the prompts again.
    wrong: tuple[set[str], set[str]] = (set(), set())
    sharer: list[int] = []  # a prompt sent one step later. The prefix cache then has the failed load's blocks


LONG = prompt(720, 9)
CASES = {
    "healthy": Case(prompt(200, 3), {"load": 192}),
    # Both steps store KV computed from failed blocks. vLLM computes the prompt again, so the answer of `load` is right.
    "long": Case(LONG, {"load": 704}, [{"other": 1, "load": 256}, {"other": 1, "load": 256}], (set(), {"load"})),
    "sharer": Case(
        LONG, {"load": 704, "sharer": 256}, [{"other": 1, "load": 256}, {"other": 1, "load": 256, "sharer": 108}],
        ({"sharer"}, {"load", "sharer"}), sharer=LONG[:HIT] + prompt(108, 11),
    ),
    # The first generated token is already in flight. Without kvfix the engine dies, so this case is the last.
    "short": Case(prompt(200, 3), {"load": 192}, [{"other": 1, "load": 8}, {"other": 1, "load": 1}]),
}  # fmt: skip


def switch_on_async_scheduling() -> None:
    """Allow asynchronous scheduling, which vLLM's CPU platform turns off (cpu.py 0.32.0:331)."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        asked_for = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked_for

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    # vLLM copies sampled tokens with events and streams. The stand-ins do nothing, because a CPU copy ends at once.
    for name in ("Event", "Stream", "current_stream", "stream"):
        setattr(torch.cuda, name, getattr(cuda_stand_in.CUDA, name))


class Engine:
    def __init__(self, job: dict[str, Any]) -> None:
        switch_on_async_scheduling()
        self.llm = real_engine.make(Path(job["model"]), job["transfer"], async_scheduling=True, **job["engine"])
        self.core = self.llm.llm_engine.engine_core.engine_core
        from lmcache.integration.vllm.utils import ENGINE_NAME
        from lmcache.v1.cache_engine import LMCacheEngineBuilder

        self.lmcache = LMCacheEngineBuilder.get(ENGINE_NAME)
        self._retrieve, self.lmcache.retrieve = self.lmcache.retrieve, self.retrieve
        scheduler = self.core.scheduler
        self._update, scheduler.update_from_output = scheduler.update_from_output, self.update_from_output
        self.lose = False
        self.failed: list[dict[str, Any]] = []

    def retrieve(self, tokens: Any, mask: Any = None, **more: Any) -> Any:
        if self.lose:
            self.lose = False
            for _, _, key in self.lmcache.token_database.process_tokens(tokens):
                self.lmcache.storage_manager.local_cpu_backend.remove(key)
            for cache in more["kvcaches"]:
                blocks = torch.unique(more["slot_mapping"] // real_engine.BLOCK)
                cache[blocks] = torch.randn(cache[blocks].shape, generator=torch.Generator().manual_seed(1))
        return self._retrieve(tokens, mask, **more)

    def update_from_output(self, scheduler_output: Any, model_output: Any) -> Any:
        """Note the failed blocks of a step, the tokens of the step, and the tokens of each later step in flight."""
        connector = model_output.kv_connector_output
        if connector and connector.invalid_block_ids:
            steps = [scheduler_output, *(step for _, step, _ in reversed(self.core.batch_queue))]
            tokens = [{name.partition("-")[0]: n for name, n in step.num_scheduled_tokens.items()} for step in steps]
            self.failed.append({"blocks": len(connector.invalid_block_ids), "steps": tokens})
        return self._update(scheduler_output, model_output)

    def add(self, name: str, prompt: list[int]) -> None:
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, real_engine.greedy(TOKENS))

    def step(self, steps: int = 1000) -> dict[str, Any]:
        """Make at most `steps` steps, until no request is left. Return the answers of the ended requests."""
        answers = {}
        for _ in range(steps):
            if not self.llm.llm_engine.has_unfinished_requests():
                break
            for output in self.llm.llm_engine.step():
                cached = output.num_cached_tokens
                answers[output.request_id] = {"tokens": list(output.outputs[0].token_ids), "cached": cached}
        return answers

    def alone(self, prompts: dict[str, list[int]], cold: bool = False) -> dict[str, Any]:
        """Run each request alone, with an empty prefix cache. cold: also empty LMCache's memory."""
        answers = {}
        for name, each in prompts.items():
            self.forget(lmcache=cold)
            self.add(name, each)
            answers |= self.step()
        self.forget()
        return answers

    def forget(self, lmcache: bool = False) -> None:
        while self.core.batch_queue:  # steps without requests are still in the queue
            self.core.step_fn()
        assert self.llm.reset_prefix_cache()
        if lmcache:
            self.lmcache.storage_manager.local_cpu_backend.clear()

    def play(self, case: Case) -> dict[str, Any]:
        """While another request generates tokens, send the prompt whose load fails."""
        prompts = {"load": case.load, **({"sharer": case.sharer} if case.sharer else {})}
        other = prompt(150, 50)
        right = self.alone({**prompts, "other": other, "first": case.load[:HIT]}, cold=True)
        self.add("other", other)
        self.step(4)
        self.lose, self.failed = bool(case.steps), []
        self.add("load", case.load)
        self.step(1)
        if case.sharer:
            self.add("sharer", case.sharer)
        answers = self.step()
        assert not self.lose, "no load was tried"
        return {"right": right, "answers": answers, "again": self.alone(prompts), "failed": self.failed}


def main(job: dict[str, Any]) -> None:
    if job["apply"]:
        kvfix.apply(job["apply"])
    engine = Engine(job)
    out: dict[str, Any] = {"scheduler": type(engine.core.scheduler).__name__, "cases": {}, "died": None}
    try:
        for name, case in CASES.items():
            out["cases"][name] = engine.play(case)
    except IndexError as error:  # torch's embedding raises IndexError for the token id -1
        out["died"] = {"of": str(error), "failed": engine.failed}
    if job["apply"]:
        out["verdicts"] = {row.code: row.verdict for row in kvfix.status()}
    Path(job["out"]).write_text(json.dumps(out))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Ran]:
    """Run the cases without kvfix, and with kvfix in mode `check`, which would also show false alarms."""
    transfer = {**start.v1(64), "kv_load_failure_policy": "recompute"}
    ways = [("released", False), ("fixed", True)]
    released, fixed = (start.run(tmp_path_factory.mktemp(name), apply, transfer, **JOB) for name, apply in ways)
    return released, fixed


def played(ran: Ran, name: str) -> dict[str, Any]:
    assert ran.answer["scheduler"] == "AsyncScheduler"
    found: dict[str, Any] = ran.answer["cases"][name]
    assert found["failed"] == failed(name)
    return found


def failed(name: str) -> list[dict[str, Any]]:
    return [{"blocks": 6, "steps": CASES[name].steps}] if CASES[name].steps else []


def wrong(found: dict[str, Any]) -> tuple[set[str], set[str]]:
    right, answers, again = found["right"], found["answers"], found["again"]
    assert answers.keys() == right.keys() - {"first"}
    assert not any(answer["cached"] for answer in right.values())
    first, second = (
        {name for name, answer in each.items() if answer["tokens"] != right[name]["tokens"]}
        for each in (answers, again)
    )
    return first, second


@pytest.mark.parametrize("name", CASES)
def test_answers(name: str, engines: tuple[Ran, Ran]) -> None:
    """With kvfix all answers are right, and each hit was loaded. Without kvfix the engine dies in the last case."""
    released, fixed = engines
    found = played(fixed, name)
    assert wrong(found) == (set(), set())
    assert {each: answer["cached"] for each, answer in found["again"].items()} == CASES[name].again
    if name == "short":  # vLLM drops the token in flight, and sends -1 to the worker in place of the token
        assert released.answer["died"] == {"of": "index out of range in self", "failed": failed(name)}
    else:
        assert wrong(played(released, name)) == CASES[name].wrong


def test_healthy(engines: tuple[Ran, Ran]) -> None:
    """If the load succeeds, kvfix does not change the results. Mode `check` reports nothing, and kvfix has no error."""
    released, fixed = engines
    assert played(fixed, "healthy") == played(released, "healthy")
    once = played(fixed, "healthy")["answers"]["load"]["cached"]
    assert once == HIT
    loaded = sum(line["tokens"] for line in fixed.notes if line["what"] == "load")
    assert loaded == once + sum(sum(case.again.values()) for case in CASES.values())
    assert "Report: " not in fixed.log
    assert "a fault of kvfix itself" not in fixed.log
    assert {fixed.answer["verdicts"][code] for code in ("KVF007", "KVF022", "KVF203", "KVF205")} == {"applied"}


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
