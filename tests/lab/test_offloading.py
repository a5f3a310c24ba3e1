"""Test vLLM's offloading connectors: bugs without a scenario (KVF334, KVF335, KVF370), false findings, and events."""

import os
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import kvfix
from kvfix.ledger.events import Asked, Granted, LoadDue, Stored
from kvfix.session import session
from kvfix_tools.lab import steps as do
from kvfix_tools.lab.fuzz.schedule import Schedule
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.runner import applied
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.conftest import answers
from tests.lab.planted import SETUPS, counted, schedule_offloading, steps

#: TOKENS: length of the prompt. LIMITS: `max_offload_tokens` of each request. None: the request sets no limit.
TOKENS = 40
LIMITS = (None, 0, 8, 40)
SIMPLE = SETUPS["simple-offload"].options


@answers([2, 2, "AssertionError", 2], [2, 0, 0, 2])
def test_no_more_is_stored_than_the_request_allows() -> list[Any]:
    """The model has a Mamba KV group. Return for each limit in LIMITS the number of stored blocks, or the error."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

    options = Options(connector="offloading", block_size=16, num_blocks=32, extra={"blocks_per_chunk": 1})
    config = late.vllm_objects.vllm_config(options)
    config.cache_config.prefix_match_unit = 8
    attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
    recurrent = MambaSpec(block_size=16, shapes=((16, 64),), dtypes=(torch.float32,), mamba_cache_mode="align")
    groups = [KVCacheGroupSpec(["a"], attention), KVCacheGroupSpec(["m"], recurrent)]
    cache = KVCacheConfig(num_blocks=32, kv_cache_tensors=[], kv_cache_groups=groups)
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
    scheduler = connector.connector_scheduler
    assert scheduler.config.supports_partial_tail
    found: list[Any] = []
    for number, limit in enumerate(LIMITS):
        request = late.vllm_objects.request(Options(block_size=8), f"r{number}", prompt(TOKENS, number), 4)
        request.kv_transfer_params = {} if limit is None else {"max_offload_tokens": limit}
        connector.on_new_request(request)
        status = scheduler._req_status[request.request_id]
        status.update_offload_keys()
        for group in status.group_states:
            group.block_ids = [1, 2, 3]
        handed = SimpleNamespace(boundary_state_offloads={request.request_id: [(1, 9, TOKENS)]})
        try:
            jobs = scheduler._build_partial_tail_store_jobs(SimpleNamespace(kv_connector_block_state=handed))
            found.append(sum(len(job.src_spec.block_ids) for job in jobs.values()))
        except AssertionError as error:
            found.append(type(error).__name__)
    return found


@answers([])
def test_a_load_that_fails_behind_another_has_no_finding() -> list[str]:
    """The worker reports loads in order, so the worker reports the failed second load only after the first load."""
    with applied(True, "check"):
        engine = late.LabEngine(replace(SIMPLE, delay=6))
        steps(
            [do.serve("first", prompt(100)), do.serve("second", prompt(100, seed=1)), do.reset_prefix_cache()],
            [do.admit("again 0", prompt(100)), do.step(), do.admit("again 1", prompt(100, seed=1))],
            [do.fail_load("again 1"), do.step(2)],
        )(engine)
        assert set(engine.connector.loading()) == {"again 0", "again 1"}
        steps(do.run(), do.expect_all_ended(), counted("loads_failed", 1, 1))(engine)
    return [f"{found.code} {found.message}" for found in engine.findings]


@answers([])
def test_a_store_that_a_reset_leaves_has_no_finding() -> list[str]:
    """A reset frees the source blocks of a running store. The request then has more stored than computed tokens."""
    options = replace(
        SIMPLE, block_size=4, chunk_size=4, num_blocks=25, max_num_batched_tokens=8, delay=5, max_num_seqs=2,
        drafter="mtp", drafts=4, acceptance=30, cpu_blocks=75, extra={"lazy_offload": False},
    )  # fmt: skip
    admit = [("admit", "a", 1, 28, 30), *[("step",)] * 3, ("admit", "b", 2, 13, 1), *[("step",)] * 3]
    with applied(True, "check"):
        done = late.play(Schedule(options, [*admit, ("new_weights",)]))
    assert done.counts["preemptions"] == 2
    return [f"{found.code} {found.message}" for found in done.findings]


@answers([[300, 0, 288, 288, True], [["Granted", 288], ["LoadDue", 0, 288]], True])
def test_the_reader_knows_loads_and_stores() -> list[Any]:
    """Return a request's recorded lookup and load, and whether every recorded store of the request has tokens."""
    kvfix.apply("observe", only=[])
    schedule_offloading(late.LabEngine(SIMPLE))
    events = [each.event for each in session.events if each.event.request == "again"]
    asked = next(each for each in events if isinstance(each, Asked) and each.promised)
    load = [[type(each).__name__, *each[1:3]] for each in events if isinstance(each, (Granted, LoadDue))]
    stored = [each.start < each.end for each in events if isinstance(each, Stored)]
    return [asked[1:6], load[:2], set(stored) == {True}]


@answers([[], []], [[0, 1], [0]], fixes=["KVF370"])
def test_a_full_disk_ends_no_thread() -> list[Any]:
    """Two stores are queued, and the disk is full at the first store. Return the ended stores and the failed stores."""
    import torch
    from vllm.v1.simple_kv_offload import disk_backend
    from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

    from kvfix_tools.roundtrip import cuda_stand_in

    vars(disk_backend)["torch"] = cuda_stand_in.Torch()
    worker = SimpleCPUOffloadWorker(None, None, 0)
    with suppress(AssertionError):  # vLLM asserts that a KV cache configuration exists
        worker.register_kv_caches({"layer": torch.zeros(1)})
    from_scheduler: Any = SimpleCPUOffloadMetadata()
    from_scheduler._kvfix_knows_failed_copies = True
    worker.bind_connector_metadata(from_scheduler)
    backend = disk_backend.DiskBackend()
    left = [OSError(28, os.strerror(28))]

    def store(*_: Any) -> None:
        if left:
            raise left.pop()

    backend._do_store = store
    for number in range(2):
        backend.launch_copy([0], [0], True, number, worker._store_events)
    backend._store_queue.put(None)
    stream: Any = SimpleNamespace(wait_event=lambda event: None)
    with suppress(OSError):
        backend._store_loop(torch.device("cpu"), stream)
    return [[number for number, _ in worker._store_events], sorted(getattr(worker._store_events, "failed", ()))]


#: Request parameters that the p2p tier of OffloadingConnector reads (KVF335). The lab does not have this tier.
PEER = {"kv_request_id": "r", "remote_host": "peer", "remote_port": 1}
#: (parameters, policy that the tier must choose). REQUEST_LEVEL: the tier must store all chunks of the request.
RIGHT = (
    ({}, "CHUNK_LEVEL"),
    ({"remote_prefiller": PEER}, "CHUNK_LEVEL"),
    ({"remote_kv_source": PEER}, "CHUNK_LEVEL"),
    ({"remote_decoder": {"kv_request_id": "r"}}, "REQUEST_LEVEL"),
    ({"remote_decoder": {"kv_request_id": 7}}, "REQUEST_LEVEL"),
    ({"remote_decoder": {}}, "CHUNK_LEVEL"),
)
MALFORMED: tuple[dict[str, Any], ...] = (
    *({role: value} for role in ("remote_prefiller", "remote_kv_source") for value in ("text", 3, [PEER])),
    *({"remote_decoder": value} for value in ("text", 0, [])),
    *({role: {**PEER, "kv_request_id": ["r"]}} for role in ("remote_prefiller", "remote_decoder")),
    {"remote_decoder": {"kv_request_id": {"r": 1}}},
    {"remote_prefiller": {**PEER, "remote_port": ["x"]}, "remote_decoder": 3},
)


@answers([True, ["AttributeError", "TypeError"]], [True, ["CHUNK_LEVEL"]])
def test_malformed_parameters_end_no_engine() -> list[Any]:
    """Return whether all parameters of RIGHT get the right policy, and the policies or errors for MALFORMED."""
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.p2p.manager import P2PSecondaryTierManager

    found = []
    for params in [*(params for params, _ in RIGHT), *MALFORMED]:
        tier = P2PSecondaryTierManager.__new__(P2PSecondaryTierManager)  # its constructor needs NIXL and a port
        vars(tier).update(
            _sessions={}, _failed_req_ids=set(), _kv_to_session={}, _local_id="here",
            _control=SimpleNamespace(connect=lambda peer: None), _data=None,
        )  # fmt: skip
        context = ReqContext("r", params)
        try:
            policy = tier.on_new_request(context).policy.name
            tier.lookup(b"key", context)
            tier.on_request_finished(context)
            assert context.kv_transfer_params == params
        except Exception as error:  # noqa: BLE001 - EngineCore would die of any exception
            policy = type(error).__name__
        found.append(policy)
    right = [policy for _, policy in RIGHT]
    return [found[: len(right)] == right, sorted(set(found[len(right) :]))]
