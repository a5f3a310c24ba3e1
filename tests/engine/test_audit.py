"""The audit of hits on real engines: it is silent where the cache is right, and names the chunk and layer where not.

The faults are those of `kvfix verify` (plugin/kvfix_engine_verify.py), here in LMCache's memory. Stand-ins: the device
(kvfix_engine_verify.py), and the model's linear layers, which round as those of two ranks in half of the rounds
(audit.py).
"""

import pytest

from tests.engine import start
from tests.engine.audit import FAULTS, PROMPTS
from tests.engine.start import Ran

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ENGINE = {"max_model_len": 1024, "num_gpu_blocks_override": 257, "max_num_batched_tokens": 352}
TRANSFER = {**start.v1(64), "kv_connector": "Copied", "kv_connector_module_path": "kvfix_engine_verify"}
ENVIRONMENT = {**start.ONE_PROCESS, "KVFIX_TEST_REAL_CONNECTOR": "1"}
LAYERS = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
#: Of each fault: wrong chunks, the first of them, its first wrong layer, and K or V.
FOUND = {
    "two_chunks_swapped": (2, 0, 0, "K"),
    "chunk_of_another_prompt": (1, 0, 0, "K"),
    "chunk_shifted_by_one": (1, 0, 0, "K"),
    "last_chunk_wrong": (1, 2, 0, "K"),
    "one_layer_wrong": (3, 0, 1, "K"),
    "v_of_one_token_wrong": (1, 1, 0, "V"),
    "not_a_number": (1, 2, 1, "V"),
    "zeros": (3, 0, 0, "K"),
    "other_weights": (3, 0, None, "K"),
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return start.run(
        tmp_path_factory.mktemp(request.param), apply=False, transfer=TRANSFER, program="audit.py", engine=ENGINE,
        environment=ENVIRONMENT, dtype=request.param,
    )  # fmt: skip


def test_a_healthy_engine_has_no_report(ran: Ran) -> None:
    found = ran.answer["healthy"]
    compared = found["compared"]
    assert len({event["request"] for event in compared}) == 100
    assert sum(event["chunks"] for event in compared) == 4 * sum(len(each) // 64 for each in PROMPTS)
    assert sum(event["wrong"] for event in compared) == 0
    assert found["violations"] == {}
    # The sums differ, and are far below the limit. What is computed was not loaded.
    shares = [event["error"] / event["limit"] for event in compared]
    assert 0 < max(shares) < 0.5
    assert found["right"]
    assert found["hits"] == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_cache_is_reported(ran: Ran, fault: str) -> None:
    found = ran.answer["faults"][fault]
    (event,) = found["compared"]
    wrong, chunk, layer, kv = FOUND[fault]
    assert (event["wrong"], event["chunks"], event["start"], event["end"]) == (wrong, 3, 64 * chunk, 64 * chunk + 64)
    assert layer is None or event["layer"] == LAYERS[layer]
    assert event["part"] == kv
    assert event["error"] > event["limit"]
    assert found["right"] or fault == "other_weights"


def test_the_most_wrong_token_is_named(ran: Ran) -> None:
    assert ran.answer["faults"]["v_of_one_token_wrong"]["compared"][0]["token"] == 64 + 5
    assert ran.answer["faults"]["not_a_number"]["compared"][0]["token"] == 128 + 7


def test_without_the_audit_the_answer_is_wrong(ran: Ran) -> None:
    assert ran.answer["faults"]["zeros"]["right when loaded"] is False


def test_the_log_has_rule_and_arithmetic(ran: Ran) -> None:
    assert "KVR027 cache-differs-from-computed" in ran.log
    assert "2 of 3 chunks differ from the computed KV. The first, tokens 0 to 64: K of model.layers.0" in ran.log
    assert "Report: " in ran.log


def test_scheduler_and_worker_choose_the_same_hits(ran: Ran) -> None:
    found = ran.answer["half"]
    assert found["compared"] == found["not promised"] == found["chosen"]
    assert 0 < len(found["chosen"]) < found["asked"] == len(PROMPTS)


def test_nothing_is_left_behind(ran: Ran) -> None:
    assert set(ran.answer["left"].values()) == {0}, ran.answer["left"]


def test_an_error_in_the_audit_stops_the_audit_only(ran: Ran) -> None:
    found = ran.answer["error"]
    assert found["calls"] == 1
    assert found["answers"][0] == found["answers"][1]
    assert found["faults"] == {"a fault of kvfix itself in kvfix.connector_events.audit: RuntimeError": 1}
    assert set(found["left"].values()) == {0}
    assert ran.log.count("a fault of kvfix itself") == 1


def test_as_released_every_hit_is_found_wrong(ran: Ran) -> None:
    """Without KVF020: store and load of LMCache 0.5.6 copy wrong in the same way under vLLM 0.32."""
    (event,) = ran.answer["released"]
    assert (event["wrong"], event["chunks"]) == (3, 3)
    assert event["error"] > 0.5


def test_strict_raises(ran: Ran) -> None:
    assert ran.answer["strict"].startswith("Violation: kvfix KVR027 cache-differs-from-computed")
