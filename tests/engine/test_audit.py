"""Test the audit of cache hits on real engines. The audit reports only wrong KV, and names the wrong chunk and layer.

The tests plant the faults of plugin/kvfix_engine_verify.py. start.py also runs this file as a program. LMCache and
the program share one process, so the program can change chunks in LMCache's memory.
"""

import json
import sys
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import kvfix
from kvfix.connector_events import audit
from kvfix.session import session
from kvfix_tools.roundtrip import real_engine
from kvfix_tools.roundtrip.real_engine import prompt
from tests.engine import start
from tests.engine.start import Ran

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOKENS = 4
#: Some prompts fill whole chunks, some end inside a chunk, some need several steps. PROMPTS has 108 whole chunks.
PROMPTS = [prompt(tokens, seed) for seed, tokens in enumerate([100, 128, 200, 256, 411, 657] * 4 + [300], 1)]
#: The tests plant faults in the cached chunks of WRONG. This prompt has three whole chunks and a part of a chunk.
WRONG, OTHER = prompt(200, 77), prompt(200, 78)
ENGINE = {"max_model_len": 1024, "num_gpu_blocks_override": 257, "max_num_batched_tokens": 352}
TRANSFER = {**start.v1(64), "kv_connector": "Copied", "kv_connector_module_path": "kvfix_engine_verify"}
ENVIRONMENT = {**start.ONE_PROCESS, "KVFIX_TEST_REAL_CONNECTOR": "1"}
#: {fault: (number of wrong chunks, index of the first wrong chunk, its first wrong layer, K or V, worst token)}
#: None means that the test does not check the value.
FOUND: dict[str, tuple[int, int, int | None, str, int | None]] = {
    "two_chunks_swapped": (2, 0, 0, "K", None),
    "chunk_of_another_prompt": (1, 0, 0, "K", None),
    "chunk_shifted_by_one": (1, 0, 0, "K", None),
    "last_chunk_wrong": (1, 2, 0, "K", None),
    "one_layer_wrong": (3, 0, 1, "K", None),
    "v_of_one_token_wrong": (1, 1, 0, "V", 64 + 5),
    "not_a_number": (1, 2, 1, "V", 128 + 7),
    "zeros": (3, 0, 0, "K", None),
    "other_weights": (3, 0, None, "K", None),
}


class Linear:
    """Replaces vLLM's linear layers. halves: add two half sums, as two ranks do. change: relative change of weights."""

    halves = False
    change = 0.0

    @classmethod
    def apply(cls, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if cls.change:
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
            weight = (weight * (1 + cls.change * noise)).to(x.dtype)
        if not cls.halves:
            return torch.nn.functional.linear(x, weight, bias)
        half = weight.shape[1] // 2
        first = torch.nn.functional.linear(x[..., :half], weight[:, :half], bias)
        return first + torch.nn.functional.linear(x[..., half:], weight[:, half:])


class Engine:
    def __init__(self, job: dict[str, Any]) -> None:
        from vllm.model_executor.layers import utils
        from vllm.v1.attention.backends import cpu_attn

        utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: vars(layer).update(cpu_linear=Linear.apply)
        # With AMX, vLLM orders the bfloat16 values of a block in a way that the plugin does not know.
        cpu_attn._get_attn_isa = lambda *_, **__: "vec"
        self.llm = real_engine.make(Path(job["model"]), job["transfer"], job["dtype"], **job["engine"])
        from lmcache.integration.vllm.utils import ENGINE_NAME
        from lmcache.v1.cache_engine import LMCacheEngineBuilder
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.lmcache = LMCacheEngineBuilder.get(ENGINE_NAME)
        self.memory = self.lmcache.storage_manager.local_cpu_backend
        self.connectors = [self.llm.llm_engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()]

    def ask(self, prompts: list[list[int]]) -> list[list[int]]:
        return real_engine.generate(self.llm, [(each, TOKENS) for each in prompts])

    def audited(self, prompts: list[list[int]]) -> tuple[list[dict[str, Any]], list[list[int]]]:
        """Send these prompts. Return the audit's Compared events, and the answers."""
        session.events.clear()
        answers = self.ask(prompts)
        return [event._asdict() for event in self.events("Compared")], answers

    def events(self, kind: str) -> list[Any]:
        return [each.event for each in session.events if type(each.event).__name__ == kind]

    def chunks(self, tokens: list[int]) -> list[torch.Tensor]:
        keys = [key for _, _, key in self.lmcache.token_database.process_tokens(tokens=tokens)]
        return [self.memory.hot_cache[key].tensor for key in keys if key in self.memory.hot_cache]

    def audit(self, fraction: float) -> None:
        for connector in self.connectors:
            audit = vars(connector)["_kvfix_audit"]
            audit.failed, audit._below = False, fraction * 2**32

    def left(self) -> dict[str, int]:
        chunks = list(self.memory.hot_cache.values())
        scheduler = self.connectors[0]._lmcache_engine
        return {
            "pins": len(self.lmcache.lookup_pins),
            "pinned chunks": sum(each.is_pinned for each in chunks),
            "references": sum(each.get_ref_count() - 1 for each in chunks),
            "chunks that are in no cache": self.memory.memory_allocator.pin_allocator.num_active_allocations
            - len(chunks),
            "load_specs": len(scheduler.load_specs),
            "lookups": len(scheduler.lookup_client.reqs_status),
        }


def healthy(engine: Engine) -> dict[str, Any]:
    """Send 25 prompts, then repeat them in four rounds. Rounds 2 and 4 reverse the order and set `Linear.halves`."""
    cold = [engine.ask([each])[0] for each in PROMPTS]
    compared, right = [], True
    for order in (1, -1, 1, -1):
        Linear.halves = order < 0
        events, answers = engine.audited(PROMPTS[::order])
        compared += events
        right = right and (Linear.halves or answers == cold)
    Linear.halves = False
    hits = real_engine.counter(engine.llm, "vllm:external_prefix_cache_hits")
    return {"compared": compared, "right": right, "hits": hits, "violations": dict(session.violations)}


def faults(engine: Engine) -> dict[str, Any]:
    """For each fault, return the comparisons, and True if the answer is right. Repeat `zeros` without the audit."""
    import kvfix_engine_verify

    right, _ = (engine.ask([each])[0] for each in (WRONG, OTHER))
    chunks, found = engine.chunks(WRONG), {}
    kept = torch.cat(chunks, dim=2)  # [K and V, layers, tokens, width]
    kvfix_engine_verify.EARLIER[:] = engine.chunks(OTHER)[:1]
    for fault in FOUND:
        kv = kept.clone()
        if fault == "other_weights":
            Linear.change = 0.05
        else:
            kvfix_engine_verify.plant(fault, kv, "")
        put(chunks, kv)
        events, (answer,) = engine.audited([WRONG])
        found[fault] = {"compared": events, "right": answer == right}
        if fault == "zeros":
            engine.audit(0)
            _, (answer,) = engine.audited([WRONG])
            found[fault]["right when loaded"] = answer == right
            engine.audit(1)
    put(chunks, kept)
    Linear.change = 0
    return found


def put(chunks: list[torch.Tensor], kv: torch.Tensor) -> None:
    for chunk, part in zip(chunks, kv.split([each.shape[2] for each in chunks], dim=2), strict=True):
        chunk.copy_(part)


def half_of_the_hits(engine: Engine) -> dict[str, Any]:
    """Audit half of the hits. Return three lists of request ids: compared, not promised, chosen (CRC below 2**31)."""
    engine.audit(0.5)
    compared, _ = engine.audited(PROMPTS)
    asked = {event.request: event.promised for event in engine.events("Asked")}
    engine.audit(1)
    return {
        "compared": sorted({event["request"] for event in compared}),
        "not promised": sorted(name for name, promised in asked.items() if not promised),
        "chosen": sorted(name for name in asked if zlib.crc32(name.encode()) < 2**31),
        "asked": len(asked),
    }


def error_in_kvfix(engine: Engine) -> dict[str, Any]:
    """Send a prompt twice while the comparison raises. Return call count, answers, kvfix's errors and `left()`."""
    with mock.patch.object(audit, "largest", side_effect=RuntimeError("planted")) as largest:
        answers = [engine.ask([WRONG])[0] for _ in range(2)]
    engine.audit(1)
    return {"calls": largest.call_count, "answers": answers, "faults": session.faults, "left": engine.left()}


def strict(engine: Engine) -> str:
    kvfix.apply("strict", audit=1.0)
    for chunk in engine.chunks(WRONG):
        chunk.zero_()
    try:
        engine.ask([WRONG])
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


def main(job: dict[str, Any]) -> None:
    kvfix.apply("check", audit=1.0)
    engine = Engine(job)
    out: dict[str, Any] = {"healthy": healthy(engine), "faults": faults(engine), "half": half_of_the_hits(engine)}
    out["left"] = engine.left()
    out["error"] = error_in_kvfix(engine)
    kvfix.apply("check", skip=["KVF020"], audit=1.0)
    engine.memory.clear()
    engine.ask([WRONG])
    out["released"], _ = engine.audited([WRONG])
    out["strict"] = strict(engine)
    Path(job["out"]).write_text(json.dumps(out))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    more = {"program": Path(__file__).name, "engine": ENGINE, "environment": ENVIRONMENT, "dtype": request.param}
    return start.run(tmp_path_factory.mktemp(request.param), apply=False, transfer=TRANSFER, **more)


def test_a_healthy_engine_has_no_report(ran: Ran) -> None:
    found = ran.answer["healthy"]
    compared = found["compared"]
    assert len({event["request"] for event in compared}) == 100
    assert sum(event["chunks"] for event in compared) == 4 * sum(len(each) // 64 for each in PROMPTS)
    assert sum(event["wrong"] for event in compared) == 0
    assert found["violations"] == {}
    # If the audit compared the cached KV with itself and not with newly computed KV, each error would be 0.
    assert 0 < max(event["error"] / event["limit"] for event in compared) < 0.5
    assert found["right"]
    assert found["hits"] == 0
    assert set(ran.answer["left"].values()) == {0}, ran.answer["left"]


@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_in_the_cache_is_reported(ran: Ran, fault: str) -> None:
    found = ran.answer["faults"][fault]
    (event,) = found["compared"]
    wrong, chunk, layer, kv, token = FOUND[fault]
    assert (event["wrong"], event["chunks"], event["start"], event["end"]) == (wrong, 3, 64 * chunk, 64 * chunk + 64)
    assert layer is None or event["layer"] == f"model.layers.{layer}.self_attn.attn"
    assert event["part"] == kv
    assert token is None or event["token"] == token
    assert event["error"] > event["limit"]
    assert found["right"] or fault == "other_weights"
    assert fault != "zeros" or found["right when loaded"] is False  # without the audit, vLLM loads the zeros


def test_the_log_has_rule_and_arithmetic(ran: Ran) -> None:
    assert "KVR027 cache-differs-from-computed" in ran.log
    assert "2 of 3 chunks differ from the computed KV. The first, tokens 0 to 64: K of model.layers.0" in ran.log
    assert "Report: " in ran.log


def test_scheduler_and_worker_choose_the_same_hits(ran: Ran) -> None:
    found = ran.answer["half"]
    assert found["compared"] == found["not promised"] == found["chosen"]
    assert 0 < len(found["chosen"]) < found["asked"] == len(PROMPTS)


def test_an_error_in_the_audit_stops_the_audit_only(ran: Ran) -> None:
    found = ran.answer["error"]
    assert found["calls"] == 1
    assert found["answers"][0] == found["answers"][1]
    assert found["faults"] == {"a fault of kvfix itself in kvfix.connector_events.audit: RuntimeError": 1}
    assert set(found["left"].values()) == {0}
    assert ran.log.count("a fault of kvfix itself") == 1


def test_as_released_every_hit_is_found_wrong(ran: Ran) -> None:
    """Without KVF020, every hit is wrong, because LMCache 0.5.6 stores and loads KV of vLLM 0.32 wrongly."""
    (event,) = ran.answer["released"]
    assert (event["wrong"], event["chunks"]) == (3, 3)
    assert event["error"] > 0.5


def test_strict_raises(ran: Ran) -> None:
    assert ran.answer["strict"].startswith("Violation: kvfix KVR027 cache-differs-from-computed")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
