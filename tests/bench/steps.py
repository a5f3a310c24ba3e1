"""Of the time that vLLM's scheduler takes for a step with 256 running requests: what kvfix adds to it in each mode.

`schedule()` and `update_from_output()` of the real scheduler with LMCache's connector, all modes in turn in one
process. A real step takes milliseconds more, for the model.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.row import Row
from tests.conftest import RELEASES, Fresh

CASE = """
import gc, os, tempfile, time
import kvfix
from kvfix_tools.lab import runner
runner.prepare({path!r})
os.environ["KVFIX_DUMP_DIR"] = tempfile.mkdtemp(prefix="kvfix-bench-")
with runner.quiet():
    from kvfix_tools.lab import vllm_objects
    from kvfix_tools.lab.options import Options
    from kvfix_tools.lab.steps import prompt
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.outputs import ModelRunnerOutput
    RUNNING, STEPS, ROUNDS = 256, 10, 36
    options = Options(connector="v1", block_size=16, num_blocks=RUNNING * 300, chunk_size=256, max_num_seqs=RUNNING,
                      max_num_batched_tokens=8192, max_model_len=1 << 14)
    config = vllm_objects.vllm_config(options)
    scheduler = vllm_objects.scheduler(options, config)
    scheduler.connector._lmcache_engine.lookup_client.lookup = lambda *_, **__: 0
    for number in range(RUNNING):
        scheduler.add_request(vllm_objects.request(options, str(number), prompt(40 + number % 7, number), 8000))
    def choose(mode):
        kvfix.revert()
        if mode:
            kvfix.apply(mode=mode, only=None if mode == "fix" else [])
            KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    def step():
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        scheduler.update_from_output(output, ModelRunnerOutput(
            req_ids=names, req_id_to_index={{name: at for at, name in enumerate(names)}},
            sampled_token_ids=vllm_objects.sampled([[7]] * len(names)), logprobs=None, prompt_logprobs_dict={{}},
            pooler_output=None))
        return len(names)
    def batch(mode):
        choose(mode)
        step()  # it pays for the change
        start = time.process_time()
        for _ in range(STEPS):
            step()
        return time.process_time() - start
    while step() < RUNNING:
        pass
    assert len(scheduler.running) == RUNNING
    modes = [None, "fix", "observe", "check"]
    took = {{mode: [] for mode in modes}}
    gc.collect(); gc.freeze(); gc.disable()
    for turn in range(ROUNDS):
        for mode in modes[turn % 4:] + modes[:turn % 4]:
            took[mode].append(batch(mode))
        gc.collect(0)
    assert len(scheduler.running) == RUNNING
    def typical(mode):  # what disturbs a batch only makes it longer
        return sum(sorted(took[mode])[:ROUNDS // 4])
    alone = typical(None)
    result = {{mode: typical(mode) / alone - 1 for mode in modes[1:]}}
    result["milliseconds"] = 1000 * alone / (STEPS * (ROUNDS // 4))
"""

#: The connector's own hook, over an adapter that does nothing. Every other figure is without `layers`.
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


#: Percent of a step.
BUDGET = {"fix": 2, "observe": 2, "check": 5}


def measure() -> Iterator[Row]:
    without, unwatched, watched = Fresh(limit=None)(LAYER.format(path=str(RELEASES / "0.5.6")))
    beside = f"without kvfix {without:.0f} ns"
    yield Row("a layer's hook, check", unwatched - without, "ns more", f"{beside}, the same function", at_most=50)
    yield Row("a layer's hook, check with layers", watched - without, "ns more", beside, at_most=1000)
    more = Fresh(limit=None)(CASE.format(path=str(RELEASES / "0.5.6")))
    beside = f"{more.pop('milliseconds'):.2f} ms a step without kvfix, 256 running"
    for mode, share in more.items():
        yield Row(f"scheduler steps, {mode}", 100 * share, "% more", beside, at_most=BUDGET[mode])
