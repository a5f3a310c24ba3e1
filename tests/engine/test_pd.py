"""Real prefill and decode engines answer as one engine without a connector does. After a kill, no answer is wrong."""

import itertools
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvfix.ledger import events as ev
from kvfix.ledger import standstill
from kvfix_tools import engine_recordings, recording, replay
from kvfix_tools.diagnose import command as diagnose
from kvfix_tools.diagnose.diagnosis import diagnosed
from kvfix_tools.look import command, looking
from kvfix_tools.peer_recordings import Peers
from kvfix_tools.roundtrip.real_engine import BLOCK, MODEL, prompt
from tests.engine import start, vllm_server
from tests.engine.vllm_server import Pair, Request, Server, ask, ask_all, post

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LOAD, KILLED = (200, 16) if "KVFIX_TEST_LONG" in os.environ else (40, 12)
#: Seconds for which prefill keeps blocks. On a busy host, decode may need more than vLLM's default of 30 s.
LEASE = 120
#: Maximum number of starts of both engines. The fixture `pair` starts both engines again if the handshake is late.
STARTS = 4
SEEDS = itertools.count(1)
#: The finding in decode's log for a request whose parameters name no host.
LOST_HOST = {"KVD584"}
#: Bytes of a block: K and V of 32 tokens in each layer, in float32.
BLOCK_BYTES = BLOCK * 2 * 4 * MODEL["num_hidden_layers"] * MODEL["num_key_value_heads"] * MODEL["head_dim"]


def requests(count: int) -> list[Request]:
    """Return requests whose prompts begin differently, so that a prefix cache never has a hit."""
    drawn = random.Random(count)
    return [(prompt(drawn.randrange(40, 400), next(SEEDS)), drawn.randrange(1, 24)) for _ in range(count)]


ROUNDS = {"load": requests(LOAD), "crossed": requests(1), "prefill": requests(KILLED), "decode": requests(KILLED)}
Answers = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    engine = {name.replace("-", "_"): size for name, size in vllm_server.FEW_BLOCKS.items()}
    rounds = list(ROUNDS.values())
    folder = tmp_path_factory.mktemp("plain")
    ran = start.run(folder, False, None, rounds=rounds, engine=engine, environment=start.ONE_PROCESS)
    return dict(zip(ROUNDS, ran.answer["rounds"], strict=True))


@pytest.fixture(scope="module")
def pair(expected: Answers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Yield both engines. Start both engines again if a handshake takes over 5 s (nixl/base_worker.py 0.32.0:1044)."""
    extra = {"kv_lease_duration": LEASE}
    for _ in range(STARTS):
        with vllm_server.pair(tmp_path_factory.mktemp("pd"), "check", kv_connector_extra_config=extra) as pair:
            answer = ask(pair.url, ROUNDS["load"][0])
            if answer is not None:
                assert answer == expected["load"][0]
                yield pair
                return
            assert "zmq.error.Again" in pair.decode.log.read_text()
    pytest.fail(f"prefill did not answer decode's handshake in 5 s, in {STARTS} starts")


def findings(engine: Server) -> set[str]:
    """Wait until the log has the statistics of the last answer. Return the findings in the log."""
    found: set[str] = set()

    def has_settled() -> bool:
        found.clear()
        found.update(each.rule.code for each in diagnosed(engine.log.read_bytes()).findings if not each.is_note)
        return not {"KVD202", "KVD1065", "KVD1196"} & found

    engine.until(has_settled, "no statistics of the last answer")
    return found


def computed(engine: Server) -> dict[str, float]:
    """Return for each source the number of prompt tokens whose KV came from the source."""
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    return {source: engine.metric("vllm:prompt_tokens_by_source_total", source=source) for source in sources}


def test_equal_answers(pair: Pair, expected: Answers) -> None:
    asked = ROUNDS["load"]
    tokens, blocks = sum(len(each) for each, _ in asked), sum(-(-len(each) // BLOCK) for each, _ in asked)
    assert ask_all(pair.url, asked[1:]) == expected["load"][1:]
    assert computed(pair.prefill) == {"local_compute": tokens, "local_cache_hit": 0, "external_kv_transfer": 0}
    assert computed(pair.decode) == {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": tokens}
    assert pair.decode.metric("vllm:nixl_xfer_time_seconds_count") == len(asked)
    assert pair.decode.metric("vllm:nixl_bytes_transferred_sum") == blocks * BLOCK_BYTES
    recorders = {each: each.recorders() for each in (pair.prefill, pair.decode)}
    for each, files in recorders.items():
        (engine,) = engine_recordings.engines(map(recording.read, files))
        assert engine.scheduler is not None
        events = [entry.event for entry in engine.scheduler.entries]
        granted = [event.external for event in events if isinstance(event, ev.Granted)]
        assert sum(granted) == (tokens if each is pair.decode else 0)
        assert replay.replay(files, json=True) == 0
        assert "Report: " not in each.log.read_text()
        assert "a fault of kvfix itself" not in each.log.read_text()
        assert findings(each) == set()
    assert diagnose.main([str(pair.prefill.log), str(pair.decode.log)]) == 0
    both = [file for files in recorders.values() for file in files]
    peers = Peers(engine_recordings.engines(map(recording.read, both)))
    assert len({link.kept for link in peers.links}) == len({link.reader for link in peers.links}) == len(asked)
    for link in peers.links:
        story = [entry.event for _, entry in peers.history([link])]
        assert any(isinstance(event, ev.Leased) and event.seconds == LEASE for event in story)
        assert any(isinstance(event, ev.LeaseEnded) and event.expired is False for event in story)
    assert replay.replay(both, json=True) == 0


def test_a_lease_that_is_not_returned(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """Without prefill's host, decode cannot return the lease. Only a replay of both recordings shows the violation."""
    tokens, count = prompt(100, next(SEEDS)), 4
    params = post(pair.prefill.url, (tokens, 1), kv_transfer_params={"do_remote_decode": True})["kv_transfer_params"]
    del params["remote_host"]
    assert ask(pair.decode.url, (tokens, count), kv_transfer_params=params) is not None
    files: list[list[Path]] = []

    def shows() -> bool:
        files[:] = [pair.prefill.recorders(), pair.decode.recorders()]
        return replay.replay([*files[0], *files[1]], json=False) == 1

    pair.prefill.until(shows, "the lease is given back")
    assert f"SUMMARY: kvfix KVR025 lease-not-returned request {params['remote_request_id']}" in capsys.readouterr().out
    assert [replay.replay(of_engine, json=False) for of_engine in files] == [0, 0]
    assert findings(pair.decode) == LOST_HOST


def test_the_kv_of_another_prompt(pair: Pair, expected: Answers) -> None:
    """Negative control: if decode reads the KV of another prompt, decode's answer is wrong."""
    (((tokens, count),), (right,)) = ROUNDS["crossed"], expected["crossed"]
    other = prompt(len(tokens), next(SEEDS))
    params = post(pair.prefill.url, (other, 1), kv_transfer_params={"do_remote_decode": True})["kv_transfer_params"]
    assert ask(pair.decode.url, (tokens, count), kv_transfer_params=params) not in (None, right)


def killed(pair: Pair, dies: Server, asked: list[Request], right: list[list[int]]) -> None:
    """Pause decode, and kill the server `dies`. Each client must get the right answer or an error."""
    ended = "vllm:request_success_total"
    before = pair.prefill.metric(ended)
    with ThreadPoolExecutor(1) as clients:
        pair.decode.signal(signal.SIGSTOP)
        got = clients.submit(ask_all, pair.url, asked)
        pair.prefill.until(lambda: pair.prefill.metric(ended) >= before + vllm_server.CLIENTS, "no prefill ends")
        dies.kill()
        if dies is not pair.decode:
            pair.decode.signal(signal.SIGCONT)
        wrong = [each for each, answer in zip(got.result(), right, strict=True) if each not in (None, answer)]
    assert wrong == []
    assert None in got.result()


def verdicts(engine: Server) -> list[standstill.Verdict]:
    return standstill.verdicts(command.enough(looking.Looker(looking.engine_of(engine.process.pid), full=False)))


def test_prefill_is_killed(pair: Pair, expected: Answers) -> None:
    """UCX reports prefill's death to decode. Decode then drops all reads from prefill, and serves the next request."""
    killed(pair, pair.prefill, ROUNDS["prefill"], expected["prefill"])
    assert verdicts(pair.decode) == []
    assert pair.decode.metric("vllm:num_requests_waiting") == pair.decode.metric("vllm:num_requests_running") == 0
    assert ask(pair.decode.url, ROUNDS["prefill"][0]) == expected["prefill"][0]
    # KVD1156: decode can no longer send a notice to the killed prefill instance.
    assert findings(pair.decode) - {"KVD1156"} == {"KVD591", *LOST_HOST}


@pytest.mark.skipif("KVFIX_TEST_LONG" not in os.environ, reason="minutes more: KVFIX_TEST_LONG=1 runs it")
def test_decode_is_killed(pair: Pair, expected: Answers) -> None:
    """If decode is killed, prefill keeps the unread blocks until the lease expires."""
    pair.prefill.kill()
    with pair.prefill.running(**vllm_server.FEW_BLOCKS) as prefill:
        assert ask_all(pair.url, ROUNDS["prefill"]) == expected["prefill"]
        assert findings(prefill) == set()
        killed(pair, pair.decode, ROUNDS["decode"], expected["decode"])
        prefill.until(lambda: "Releasing expired KV blocks" in prefill.log.read_text(), "it keeps the blocks")
        assert verdicts(prefill) == []
        assert ask(prefill.url, ROUNDS["decode"][0]) == expected["decode"][0]
        assert findings(prefill) == {"KVD574"}
