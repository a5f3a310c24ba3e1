"""With speculative decoding, two ranks or sliding windows, LMCache and kvfix in mode `check` change no answer."""

import importlib.metadata
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvfix.ledger import events as ev
from kvfix_tools import engine_recordings
from kvfix_tools.doctor import command_line, servers
from kvfix_tools.doctor.setup import Setup
from kvfix_tools.roundtrip import real_engine
from tests.conftest import Fresh
from tests.doctor.sites import problems
from tests.doctor.test_planted import words
from tests.engine import start
from tests.engine.start import CROWD, ENGINE, Ran, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

DRAFTS, ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
ANSWERS = [(prompt(200, seed), 70) for seed in range(21, 25)]  # a prompt fills 3 chunks, and its answer fills the 4th
#: Two rounds send ANSWERS. A prompt of the third round is a prompt of ANSWERS, followed by the model's answer.
TURNS = [ANSWERS, ANSWERS, [(each, 8) for each in range(len(ANSWERS))]]
NGRAM: dict[str, Any] = {
    "rounds": TURNS,
    "engine": {
        **ENGINE,
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4
        },
    },
    "config": {"initializer_range": 0.03},  # with these weights the model repeats tokens, so vLLM accepts drafts
    "counters": [DRAFTS, ACCEPTED],
    "environment": start.ONE_PROCESS,
}  # fmt: skip
FEW = [(prompt(300, seed), 12) for seed in range(1, 4)]
RANKS: dict[str, Any] = {"rounds": [FEW, FEW], "engine": {**ENGINE, "tensor_parallel_size": 2}}
#: A model with three KV groups: one has full attention, and two have windows of two chunks.
WINDOWS: dict[str, Any] = {
    "rounds": [CROWD, CROWD],
    "engine": {**ENGINE, "num_gpu_blocks_override": 97, "disable_hybrid_kv_cache_manager": False},
    "config": {
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 128,
    },
    "environment": start.ONE_PROCESS,
}  # fmt: skip


class Engines:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stop_server = stack.close
        l2 = json.dumps({"type": "fs", "base_path": str(folder / "l2")})
        self.transfer = stack.enter_context(start.server(options=("--separate-object-groups", "--l2-adapter", l2)))
        self.port: int = self.transfer["kv_connector_extra_config"]["lmcache.mp.port"]
        command = servers.running(self.port)
        assert command is not None
        self.http = f"http://localhost:{command.options['http-port']}"
        self._plain: dict[int, Ran] = {}

    def plain(self, job: dict[str, Any]) -> Ran:
        if id(job) not in self._plain:
            self._plain[id(job)] = start.run(self.folder / f"plain-{len(self._plain)}", False, None, **job)
        return self._plain[id(job)]

    def in_process(self, name: str, job: dict[str, Any], **settings: Any) -> Ran:
        return start.run(self.folder / name, True, start.v1(64, **settings), mode="check", **job)

    def on_server(self, name: str, job: dict[str, Any], mix_before: int = -1, **settings: Any) -> Ran:
        """Run an engine with an LMCache server. After the first round, all hits come from the server's L2 cache."""
        extra = {f"lmcache.mp.{key}": value for key, value in settings.items()}
        extra |= self.transfer["kv_connector_extra_config"]
        before = {number: [["empty_l1", self.http]] for number in range(1, len(job["rounds"]))}
        before.setdefault(mix_before, []).append(["mix_l2", str(self.folder / "l2")])
        return start.run(
            self.folder / name, True, {**self.transfer, "kv_connector_extra_config": extra}, mode="check",
            before=before, **job,
        )  # fmt: skip


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(tmp_path_factory.mktemp("production"), stack)


def tokens(part: engine_recordings.Part) -> dict[str, int]:
    events = [entry.event for entry in part.entries]
    return {
        "granted": sum(event.external for event in events if isinstance(event, ev.Granted)),
        "due": sum(event.end - event.start for event in events if isinstance(event, ev.LoadDue)),
        "loaded": sum(event.tokens for event in events if isinstance(event, ev.Loaded)),
    }


def assert_loaded(ran: Ran, plain: Ran, ranks: int = 1) -> None:
    """Assert that the engine answers as plain vLLM does, and that each rank has loaded the granted tokens."""
    rounds = plain.answer["rounds"]
    assert ran.answer["rounds"][: len(rounds)] == rounds
    scheduled, *workers = map(tokens, ran.assert_healthy(ranks).parts)
    # Each request that is sent again loads at least three chunks.
    assert scheduled["due"] >= scheduled["granted"] >= 192 * sum(map(len, rounds[1:]))
    for rank in workers:
        assert rank["due"] == scheduled["due"]
        assert rank["loaded"] in (0, rank["due"])  # 0: for LMCache in process, kvfix records no Loaded event
    if not scheduled["loaded"]:
        assert sum(line["tokens"] for line in ran.notes if line["what"] == "load") >= ranks * scheduled["due"]


PLACES = pytest.mark.parametrize("place", ["on_server", "in_process"])


@PLACES
def test_speculative_decoding(place: str, engines: Engines) -> None:
    ran = getattr(engines, place)(f"ngram-{place}", NGRAM, save_decode_cache=True)
    assert_loaded(ran, engines.plain(NGRAM))
    # vLLM accepted some drafts and rejected some. LMCache also loaded the fourth chunk, which has generated tokens.
    assert 0 < ran.answer["counters"][ACCEPTED] < ran.answer["counters"][DRAFTS]
    granted = [line["tokens"] for line in ran.notes if line["what"] == "grant"]
    assert granted[-len(ANSWERS) :] == [256] * len(ANSWERS)


@PLACES
def test_two_ranks(place: str, engines: Engines) -> None:
    assert_loaded(getattr(engines, place)(f"ranks-{place}", RANKS), engines.plain(RANKS), ranks=2)


def test_sliding_windows(engines: Engines) -> None:
    """Negative control: the test swaps the bytes of chunks in L2 before the third round, and the answers change."""
    third = {**WINDOWS, "rounds": [*WINDOWS["rounds"], CROWD]}
    ran = engines.on_server("windows", third, mix_before=2, mp_transfer_mode="lmcache_driven")
    assert "group_tokens_per_block=[32, 32, 32]" in ran.log
    assert_loaded(ran, engines.plain(WINDOWS))
    assert ran.answer["rounds"][2] != ran.answer["rounds"][1]


def test_doctor_knows_the_server(engines: Engines, fresh: Fresh, tmp_path: Path) -> None:
    command, url = words(tmp_path, engines.transfer), f"tcp://localhost:{engines.port}"
    doctor = [sys.executable, "-m", "kvfix_tools.cli", "doctor", "--json", "--", *command]
    done = fresh.run(doctor, **real_engine.ENVIRONMENT)
    assert done.returncode == 0, done.stdout
    found = [(line["check"], line["status"], line["what"]) for line in json.loads(done.stdout)]
    release = importlib.metadata.version("lmcache")
    assert ("server", "ok", f"a server answers at {url}") in found
    assert ("server", "ok", f"the server at {url} is LMCache {release}") in found
    engines.stop_server()
    (line,) = problems(Setup(command_line.read(command), {}), "server")
    assert f"no LMCache server answers at {url}: Connection refused" in line.what
