"""Test KVF301, KVF302, KVF303, KVF312, KVF340 and KVF367: NixlConnector and MooncakeConnector on the real scheduler."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvfix.fixes.nixl import kvf301_nixl_promise_without_blocks
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.conftest import RELEASES, Once, answers

FROM_PREFILL = {"do_remote_prefill": True, "remote_engine_id": "prefill"}
NIXL = {
    **FROM_PREFILL, "remote_request_id": "p-1", "remote_block_ids": [[1, 2, 3, 4]], "remote_host": "prefill",
    "remote_port": 5600, "tp_size": 1,
}  # fmt: skip
MOONCAKE = {**FROM_PREFILL, "remote_bootstrap_addr": "prefill:8998", "transfer_id": "t-1"}
SEND = {"do_remote_decode": True, "transfer_id": "t-1"}
#: Results of `scheduled`: the error, the status of the request, and the number of scheduled tokens.
DIES = ["AssertionError", "WAITING", 0]
WAITS = ["", "WAITING_FOR_REMOTE_KVS", 0]
COMPUTES = ["", "RUNNING", 64]


def asked(connector: str, role: str, params: dict[str, dict[str, Any]]) -> tuple[Any, list[Any]]:
    """Return (scheduler with this connector, requests in the scheduler). params: {request id: kv_transfer_params}."""
    from vllm.config import KVTransferConfig

    options = Options(block_size=16, num_blocks=32, max_num_batched_tokens=64)
    config = late.vllm_objects.vllm_config(options)
    config.kv_transfer_config = KVTransferConfig(kv_connector=connector, kv_role=role)
    scheduler = late.vllm_objects.scheduler(options, config)
    requests = [late.vllm_objects.request(options, name, prompt(64), 4) for name in params]
    for request in requests:
        request.kv_transfer_params = dict(params[request.request_id])
        scheduler.add_request(request)
    return scheduler, requests


def scheduled(connector: str, role: str, params: dict[str, Any]) -> list[object]:
    """Schedule one request. Return the error or "", the status of the request, and the number of scheduled tokens."""
    from vllm.v1.request import RequestStatus

    scheduler, (request,) = asked(connector, role, {"r": params})
    try:
        done = scheduler.schedule()
    except AssertionError as error:
        return [type(error).__name__, request.status.name, 0]
    status = request.status.name
    if status == "RUNNING":
        scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
        assert "r" not in scheduler.requests
    return ["", status, done.num_scheduled_tokens.get("r", 0)]


#: Connector, role, kv_transfer_params, and the results of `scheduled` without fixes and with fixes.
PROMISES = {
    "nixl-no-blocks": ("Nixl", "consumer", {**NIXL, "remote_block_ids": []}, DIES, COMPUTES),
    "nixl-no-host": ("Nixl", "consumer", {name: NIXL[name] for name in NIXL if name != "remote_host"}, WAITS, COMPUTES),
    "nixl": ("Nixl", "consumer", NIXL, WAITS, WAITS),  # the fix does not stop a valid load
    "nixl-none": ("Nixl", "consumer", {}, COMPUTES, COMPUTES),
    "nixl-blocks-in-one-list": ("Nixl", "consumer", {**NIXL, "remote_block_ids": [1, 2, 3, 4]}, WAITS, WAITS),
    "mooncake-no-address": ("Mooncake", "consumer", {**FROM_PREFILL, "transfer_id": "t-1"}, WAITS, COMPUTES),
    "mooncake-load-from-prefill": ("Mooncake", "producer", MOONCAKE, DIES, COMPUTES),
    "mooncake-send-from-decode": ("Mooncake", "consumer", SEND, DIES, COMPUTES),
    "mooncake-load": ("Mooncake", "consumer", MOONCAKE, WAITS, WAITS),
    "mooncake-address-is-a-number": ("Mooncake", "consumer", {**MOONCAKE, "remote_bootstrap_addr": 8998}, WAITS, WAITS),
    "mooncake-send": ("Mooncake", "producer", SEND, COMPUTES, COMPUTES),
}


@pytest.mark.parametrize("name", PROMISES)
def test_a_promise_needs_a_peer(name: str, once: Once) -> None:
    connector, role, params, *outcomes = PROMISES[name]
    assert once.both(scheduled, RELEASES / "0.5.6", f"{connector}Connector", f"kv_{role}", params) == outcomes


@pytest.mark.parametrize(
    ("annotation", "good", "wrong"), [(list[int], [1, 2], [[1, 2]]), ("BlockIds", [[1, 2]], [1, 2])]
)
def test_blocks_are_named_as_this_release_does(annotation: Any, good: list[Any], wrong: list[Any]) -> None:
    """vLLM up to 0.15 has one list of block ids (nixl_connector.py 0.15.1:755). Later vLLM has a list per KV group."""
    scheduler = SimpleNamespace(
        get_num_new_matched_tokens=lambda self, request, num_computed_tokens: (32, True),
        update_state_after_alloc=lambda self: None,
        request_finished=SimpleNamespace(__annotations__={"block_ids": annotation}),
    )
    module = SimpleNamespace(__name__="", NixlConnectorScheduler=scheduler)
    hook = kvf301_nixl_promise_without_blocks.FIX.targets[0].fix(module)(scheduler.get_num_new_matched_tokens)
    for blocks, promised in ((good, (32, True)), (wrong, (0, False)), ([], (0, False))):
        request = SimpleNamespace(kv_transfer_params={**NIXL, "remote_block_ids": blocks})
        assert hook(scheduler, request, 0) == promised


#: The prefill request of each decode request. Request 2 repeats request 1. Request 3 is a second sample (n > 1).
ASKED = {"r-00000001": "p-1", "r-00000002": "p-1", "1_r-00000003": "p-1", "s-00000004": "p-2"}


def sent_again(connector: str) -> list[object]:
    """Schedule two steps. Return the status of each request, the scheduled tokens, and the requests that load."""
    params = {name: {**NIXL, "remote_request_id": prefill} for name, prefill in ASKED.items()}
    scheduler, requests = asked(connector, "kv_consumer", params)
    done = [scheduler.schedule() for _ in range(2)]
    loads = sorted(name for step in done for name in step.kv_connector_metadata.reqs_to_recv)
    computed = {name: step.num_scheduled_tokens[name] for step in done for name in step.num_scheduled_tokens}
    return [[request.status.name for request in requests], computed, loads]


LOADS = "WAITING_FOR_REMOTE_KVS"


@pytest.mark.parametrize(
    ("connector", "statuses", "computed"),
    [
        # vLLM's prefix cache has three of the four blocks of "1_r-00000003"
        ("NixlConnector", [LOADS, "RUNNING", "RUNNING", LOADS], {"r-00000002": 64, "1_r-00000003": 16}),
        # KVF367 also compares the request ids, without the random suffix. "1_r" is not "r", so "1_r-00000003" loads
        ("NixlPushConnector", [LOADS, "RUNNING", LOADS, LOADS], {"r-00000002": 64}),
    ],
)
def test_one_load_for_each_prefill(connector: str, statuses: list[str], computed: dict[str, int], once: Once) -> None:
    loads = sorted(name for name, status in zip(ASKED, statuses, strict=True) if status == LOADS)
    released, fixed = [[LOADS] * 4, {}, sorted(ASKED)], [statuses, computed, loads]
    assert once.both(sent_again, RELEASES / "0.5.6", connector) == [released, fixed]


@answers([LOADS], ["RUNNING"])
def test_a_prefill_engine_that_buffers_kv_in_host_memory() -> list[str]:
    """KVF312: NixlConnector promises blocks of the decode engine, but saves the request's KV and starts no load."""
    turn = {**NIXL, "do_remote_prefill": False, "do_remote_decode": True, "remote_num_tokens": 48}
    scheduler, (request,) = asked("NixlConnector", "kv_both", {"r": turn})
    nixl = scheduler.connector.connector_scheduler
    nixl.use_host_buffer, nixl.is_bidirectional_kv_xfer_enabled, nixl.kv_recompute_threshold = True, True, 0
    scheduler.schedule()
    return [request.status.name]


@answers(["AssertionError", 0.0], ["", 3.0])
def test_statistics_of_a_connector_without_metrics() -> list[object]:
    """NIXL and Mooncake report statistics in a MultiConnector. Return the error, and the number of failed transfers."""
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    config = late.vllm_objects.vllm_config(Options())
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in ("NixlConnector", "MooncakeConnector")]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": children}
    )
    types: dict[Any, Any] = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    metrics = MultiConnector.build_prom_metrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
    of_nixl = MultiConnector._get_connector_classes_and_configs(config)[0][0]
    nixl: Any = of_nixl.build_kv_connector_stats()
    for _ in range(3):
        nixl.record_failed_transfer()
    try:
        metrics.observe({"MooncakeConnector": {}, of_nixl.__name__: nixl.data}, 0)
        error = ""
    except AssertionError as raised:
        error = type(raised).__name__
    labels = {"model_name": "m", "engine": "0"}
    return [error, REGISTRY.get_sample_value("vllm:nixl_num_failed_transfers_total", labels)]
