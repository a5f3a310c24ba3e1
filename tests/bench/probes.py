"""Probes on the real scheduler with 256 running requests, beside no kvfix, in turn in one process; and per hook."""

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
    from kvfix_tools.lab import compat, engine
    from kvfix_tools.lab.options import Options
    from kvfix_tools.lab.scenario import prompt
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.outputs import ModelRunnerOutput
    RUNNING, STEPS, ROUNDS = 256, 10, 36
    options = Options(connector="v1", block_size=16, num_blocks=RUNNING * 300, chunk_size=256, max_num_seqs=RUNNING,
                      max_num_batched_tokens=8192, max_model_len=1 << 14)
    config = engine.vllm_config(options)
    scheduler = engine.scheduler(options, config)
    scheduler.connector._lmcache_engine.lookup_client.lookup = lambda *_, **__: 0
    for number in range(RUNNING):
        scheduler.add_request(engine.request(options, str(number), prompt(40 + number % 7, number), 8000))
    def choose(mode):
        kvfix.revert()
        if mode:
            kvfix.apply(mode=mode, only=[])
            KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    def step():
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        scheduler.update_from_output(output, ModelRunnerOutput(
            req_ids=names, req_id_to_index={{name: at for at, name in enumerate(names)}},
            sampled_token_ids=compat.sampled([[7]] * len(names)), logprobs=None, prompt_logprobs_dict={{}},
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
    modes = [None, "observe", "check"]
    took = {{mode: [] for mode in modes}}
    gc.collect(); gc.freeze(); gc.disable()
    for turn in range(ROUNDS):
        for mode in modes[turn % 3:] + modes[:turn % 3]:
            took[mode].append(batch(mode))
        gc.collect(0)
    assert len(scheduler.running) == RUNNING
    def typical(mode):  # what disturbs a batch only makes it longer
        return sum(sorted(took[mode])[:ROUNDS // 4])
    alone = typical(None)
    result = [alone / typical("observe"), alone / typical("check"), STEPS * (ROUNDS // 4) / alone]
"""


def measure() -> Iterator[Row]:
    observe, check, rate = Fresh()(CASE.format(path=str(RELEASES / "0.5.6")))
    beside = f"{rate:.0f} steps/s without kvfix, 256 running"
    yield Row("scheduler steps, observe", observe, "of it", beside, at_least=0.99)
    yield Row("scheduler steps, check", check, "of it", beside, at_least=0.97)
