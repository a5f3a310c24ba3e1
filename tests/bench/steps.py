"""Measure the processor time that kvfix adds in each mode to a step of vLLM's scheduler with 256 running requests.

A step calls `schedule()` and `update_from_output()`. A real step also runs the model. The connector is
LMCacheConnectorV1, OffloadingConnector or NixlConnector. With OffloadingConnector, a step begins and ends eight store
jobs. With NixlConnector, a step ends a lease.
"""

from collections.abc import Iterator

from tests.bench import Row
from tests.conftest import RELEASES, Fresh

CASE = """
import gc, os, pathlib, tempfile, time
import kvfix
from kvfix.session import session
from kvfix_tools.lab import runner
from tests.engine.plugin.kvfix_engine_times import OwnTime
runner.prepare({path!r})
os.environ["KVFIX_DUMP_DIR"] = tempfile.mkdtemp(prefix="kvfix-bench-")
with runner.quiet():
    from kvfix_tools.lab.engine import vllm_objects
    from kvfix_tools.lab.options import Options
    from kvfix_tools.lab.steps import prompt
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    RUNNING, STEPS, CONNECTOR = 256, 400, {connector!r}
    options = Options(connector=CONNECTOR, block_size=16, num_blocks=RUNNING * 60, max_num_seqs=RUNNING,
                      chunk_size=32 if CONNECTOR == "offloading" else 256,
                      max_num_batched_tokens=8192, max_model_len=1 << 12)
    config = vllm_objects.vllm_config(options)
    lease = dict(sampling=dict(extra_args=dict(kv_transfer_params=dict(do_remote_decode=True))))
    happened = dict(jobs=0, leases=0)
    def add(scheduler, number, tokens, name=""):
        more = lease if CONNECTOR == "nixl-pull" else dict()
        asked = prompt(40 + number, number)
        scheduler.add_request(vllm_objects.request(options, name or str(number), asked, tokens, **more))
    def report(scheduler, metadata):
        if CONNECTOR == "offloading":
            done = OffloadingWorkerMetadata()
            for job in metadata.store_jobs:
                done.mark_completed(job)
            happened["jobs"] += len(metadata.store_jobs)
            return KVConnectorOutput(kv_connector_worker_meta=done)
        if CONNECTOR == "nixl-pull":
            sent = {{name for name, request in scheduler.requests.items() if request.is_finished()}}
            happened["leases"] += len(sent)
            return KVConnectorOutput(finished_sending=sent)
    def step(scheduler):
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        scheduler.update_from_output(output, ModelRunnerOutput(
            req_ids=names, req_id_to_index={{name: at for at, name in enumerate(names)}},
            sampled_token_ids=vllm_objects.sampled([[7]] * len(names)), logprobs=None, prompt_logprobs_dict={{}},
            pooler_output=None, kv_connector_output=report(scheduler, output.kv_connector_metadata)))
        return len(names)
    def measured(mode):
        kvfix.revert()
        kvfix.apply(mode=mode, only=None if mode == "fix" else [])
        KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        scheduler = vllm_objects.scheduler(options, config)
        if CONNECTOR == "v1":
            scheduler.connector._lmcache_engine.lookup_client.lookup = lambda *_, **__: 0
        for number in range(RUNNING):  # 256 lengths: equally many requests need a block, or end a chunk, in each step
            add(scheduler, number, 100 + number if CONNECTOR == "nixl-pull" else 600)
        while step(scheduler) < RUNNING:
            pass
        own = OwnTime(function for function in session.wrapped.values() if function._wrappers)
        gc.collect(); gc.freeze(); gc.disable()
        took = 0
        for number in range(STEPS):
            while CONNECTOR == "nixl-pull" and len(scheduler.running) + len(scheduler.waiting) < RUNNING:
                add(scheduler, 0, RUNNING, f"later {{number}} {{len(scheduler.waiting)}}")
            start = time.thread_time()
            step(scheduler)
            took += time.thread_time() - start
        gc.enable()
        assert len(scheduler.running) >= RUNNING - 1
        assert own.calls >= STEPS
        assert CONNECTOR == "v1" or sum(happened.values()) > STEPS / 2, happened
        rest = took - own.seconds
        return own.seconds / rest, 1000 * rest / STEPS, own.calls / STEPS
    result = {{mode: measured(mode) for mode in ("fix", "observe", "check")}}
    dumps = [each for each in pathlib.Path(os.environ["KVFIX_DUMP_DIR"]).rglob("*.*") if each.suffix != ".ready"]
    assert not dumps, dumps
"""

#: Code that measures a hook which vLLM calls for each layer. CASE wraps none. The connector's adapter does nothing.
LAYER = """
import timeit
from types import SimpleNamespace
import kvfix
from kvfix_tools.lab import runner
runner.prepare({path!r})
with runner.quiet():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1
    wanted = SimpleNamespace(kv_connector="LMCacheConnectorV1", kv_connector_module_path=None)
    original = vars(LMCacheConnectorV1)["wait_for_layer_load"]
    connector = LMCacheConnectorV1.__new__(LMCacheConnectorV1)
    connector._lmcache_engine = SimpleNamespace(
        wait_for_layer_load=lambda name: None, get_block_ids_with_load_errors=set
    )
    def once(layers):
        kvfix.revert()
        if layers is not None:
            kvfix.apply("check", only=[], layers=layers)
            KVConnectorFactory.get_connector_class(wanted)
            connector.get_block_ids_with_load_errors()
        is_wrapped = vars(LMCacheConnectorV1)["wait_for_layer_load"] is not original
        assert is_wrapped is bool(layers), layers
        runs = timeit.repeat(lambda: connector.wait_for_layer_load("layer"), number=20000, repeat=5)
        if layers:
            assert connector._kvfix_watched.calls["wait_for_layer_load"] == 100000
        return min(runs) / 20000 * 1e9
    took = [[once(layers) for layers in (None, False, True)] for _ in range(7)]
    result = [sorted(each)[3] for each in zip(*took)]
"""


#: The maximum percent that each mode of kvfix may add to a step's time.
BUDGET = {"fix": 2, "observe": 2, "check": 5}
#: {connector of the lab: (what the results call a step, budget)}. With leases, each step admits one request and ends
#: another request. Mode `observe` records about six events for the two requests.
STEPS = {
    "v1": ("scheduler steps", BUDGET),
    "offloading": ("steps with OffloadingConnector's jobs", BUDGET),
    "nixl-pull": ("steps with NixlConnector's leases", {**BUDGET, "observe": 3}),
}
#: Maximum calls of kvfix's wrappers in a step. A wrapper called for each of the 256 requests exceeds this maximum.
CALLS = 24


def measure() -> Iterator[Row]:
    without, unwatched, watched = Fresh(limit=None)(LAYER.format(path=str(RELEASES / "0.5.6")))
    context = f"without kvfix {without:.0f} ns"
    yield Row("a layer's hook, check", unwatched - without, "ns more", f"{context}, the same function", at_most=50)
    yield Row("a layer's hook, check with layers", watched / without, "x the hook", context, at_most=12)
    for connector, (what, budget) in STEPS.items():
        found = Fresh(limit=None)(CASE.format(path=str(RELEASES / "0.5.6"), connector=connector))
        for mode, (share, milliseconds, calls) in found.items():
            context = f"{milliseconds:.2f} ms a step without kvfix"
            yield Row(f"{what}, {mode}", 100 * share, "% more", context, at_most=budget[mode])
            yield Row(f"wrapped calls of {what}, {mode}", calls, "a step", "256 running requests", at_most=CALLS)
