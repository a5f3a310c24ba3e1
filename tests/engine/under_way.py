"""Loads of LMCache in one asynchronous engine: one that succeeds, and some that fail while the next step is under way.

Run by run.py as `python under_way.py JOB.json`; writes the job's `out`. The engine runs in this process, so that a case
can add a request between two of its steps. What is asked for again after a case is loaded, the prefix cache is empty.

A load fails because its chunks have gone from LMCache's store between lookup and load. The request's blocks then hold
what others have left in them: numbers drawn here, since in a small engine they could be the very ones.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import asynchronous
import torch

from kvfix_tools.roundtrip import engines
from kvfix_tools.roundtrip.engines import prompt

TOKENS = 12


class Engine:
    def __init__(self, job: dict[str, Any]) -> None:
        asynchronous.switch_on()
        self.llm = engines.make(Path(job["model"]), job["transfer"], async_scheduling=True, **job["engine"])
        self.core = self.llm.llm_engine.engine_core.engine_core
        from lmcache.integration.vllm.utils import ENGINE_NAME
        from lmcache.v1.cache_engine import LMCacheEngineBuilder

        self.lmcache = LMCacheEngineBuilder.get(ENGINE_NAME)
        self._retrieve, self.lmcache.retrieve = self.lmcache.retrieve, self.retrieve
        self._told, self.core.scheduler.update_from_output = self.core.scheduler.update_from_output, self.told
        self.lose = False
        self.failed: list[dict[str, Any]] = []

    def retrieve(self, tokens: Any, mask: Any = None, **more: Any) -> Any:
        if self.lose:
            self.lose = False
            for _, _, key in self.lmcache.token_database.process_tokens(tokens):
                self.lmcache.storage_manager.local_cpu_backend.remove(key)
            for cache in more["kvcaches"]:
                blocks = torch.unique(more["slot_mapping"] // engines.BLOCK)
                cache[blocks] = torch.randn(cache[blocks].shape, generator=torch.Generator().manual_seed(1))
        return self._retrieve(tokens, mask, **more)

    def told(self, scheduler_output: Any, model_output: Any) -> Any:
        """Notes, of a step in which a load has failed: its blocks, and what it and the steps after it compute."""
        connector = model_output.kv_connector_output
        if connector and connector.invalid_block_ids:
            steps = [scheduler_output, *(step for _, step, _ in reversed(self.core.batch_queue))]
            tokens = [{name.partition("-")[0]: n for name, n in step.num_scheduled_tokens.items()} for step in steps]
            self.failed.append({"blocks": len(connector.invalid_block_ids), "steps": tokens})
        return self._told(scheduler_output, model_output)

    def add(self, name: str, prompt: list[int]) -> None:
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, engines.greedy(TOKENS))

    def step(self, steps: int = 1000) -> dict[str, Any]:
        """{request: what it was answered}, of those that have ended."""
        answers = {}
        for _ in range(steps):
            if not self.llm.llm_engine.has_unfinished_requests():
                break
            for output in self.llm.llm_engine.step():
                cached = output.num_cached_tokens
                answers[output.request_id] = {"said": list(output.outputs[0].token_ids), "cached": cached}
        return answers

    def alone(self, prompts: dict[str, list[int]], cold: bool = False) -> dict[str, Any]:
        """Each by itself, and nothing of it is in the prefix cache. cold: nor in LMCache."""
        answers = {}
        for name, each in prompts.items():
            self.forget(lmcache=cold)
            self.add(name, each)
            answers |= self.step()
        self.forget()
        return answers

    def forget(self, lmcache: bool = False) -> None:
        while self.core.batch_queue:  # steps that have no request any more
            self.core.step_fn()
        assert self.llm.reset_prefix_cache()
        if lmcache:
            self.lmcache.storage_manager.local_cpu_backend.clear()

    def play(self, load: list[int], hit: int, lose: bool, sharer: list[int] | None = None) -> dict[str, Any]:
        """`load` is asked for with its first `hit` tokens in LMCache, beside one that generates. sharer: comes one step
        after, when blocks of `load` are in the prefix cache."""
        prompts = {"load": load, **({"sharer": sharer} if sharer else {})}
        beside = prompt(150, 50)
        right = self.alone({**prompts, "beside": beside, "first": load[:hit]}, cold=True)
        self.add("beside", beside)
        self.step(4)
        self.lose, self.failed = lose, []
        self.add("load", load)
        self.step(1)
        if sharer:
            self.add("sharer", sharer)
        answers = self.step()
        assert not self.lose, "no load was tried"
        return {"right": right, "answers": answers, "again": self.alone(prompts), "failed": self.failed}


LONG = prompt(720, 9)
CASES: dict[str, dict[str, Any]] = {
    "healthy": {"load": prompt(200, 3), "hit": 192, "lose": False},
    # Two steps compute on top of the load, and store that. The first blocks are cached when the sharer comes.
    "long": {"load": LONG, "hit": 192, "lose": True},
    "sharer": {"load": LONG, "hit": 192, "lose": True, "sharer": LONG[:192] + prompt(108, 11)},
    # What is under way is the first token already. The last one: as released the engine dies of it.
    "short": {"load": prompt(200, 3), "hit": 192, "lose": True},
}


def own_blocks() -> None:
    """In place of a fix that kvfix has not yet: LMCache 0.5.6 extends a list that is the worker's too
    (vllm_v1_adapter.py:245), and stores from wrong blocks what a resumed request computes in its third step."""
    from lmcache.integration.vllm.vllm_v1_adapter import RequestTracker

    update = RequestTracker.update

    def update_and_copy(tracker: Any, *args: Any, **more: Any) -> None:
        update(tracker, *args, **more)
        tracker.allocated_block_ids = list(tracker.allocated_block_ids)

    RequestTracker.update = update_and_copy


def main(job: dict[str, Any]) -> None:
    import kvfix

    if job["apply"]:
        kvfix.apply(job["apply"])
    engine = Engine(job)
    if job["apply"]:
        own_blocks()
    out: dict[str, Any] = {"scheduler": type(engine.core.scheduler).__name__, "cases": {}, "died": None}
    try:
        for name, case in CASES.items():
            out["cases"][name] = engine.play(**case)
    except IndexError as error:  # of torch's embedding
        out["died"] = {"of": str(error), "failed": engine.failed}
    if job["apply"]:
        out["verdicts"] = {row.code: row.verdict for row in kvfix.status()}
    Path(job["out"]).write_text(json.dumps(out))
    sys.stdout.flush()
    os._exit(0)  # threads of LMCache would go on


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
