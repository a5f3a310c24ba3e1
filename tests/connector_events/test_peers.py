"""Test how kvfix joins the recordings of prefill and decode. Only both recordings show an unreturned lease."""

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvfix
from kvfix import clock
from kvfix.connector_events import recorder
from kvfix.ledger import events as ev
from kvfix_tools import engine_recordings, recording
from kvfix_tools.lab import runner
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from kvfix_tools.peer_recordings import Peers, RouterLog
from tests import late
from tests.conftest import RELEASES, Once
from tests.connector_events.conftest import Replayed
from tests.connector_events.test_engine_recordings import assert_between, on_node
from tests.lab.planted import wrap
from tests.lab.planted_in_pairs import leases_are_over_at_once  # noqa: F401  `recorded` finds this fault in globals()

#: Seconds that each engine's monotonic clock and wall clock are ahead of the lab's clock.
CLOCKS = {"prefill": (0.0, 0.0), "decode": (5000.0, -3.0)}


def lose_notice(pair: Any) -> None:
    """Lose the notice in which decode tells prefill that decode has read the blocks of request b."""

    def make(original: Any, *arguments: Any, notif_msg: bytes) -> Any:
        return original(*arguments, notif_msg=b"" if notif_msg.startswith(b"b-") else notif_msg)

    wrap(pair.decode.connector.workers[0].adapter.nixl_wrapper, "make_prepped_xfer", make)


def lose_aborts(pair: Any) -> None:
    """Lose the notice that decode sends to prefill when a request ends before vLLM schedules the request."""
    scheduler = pair.decode.connector.scheduler_side

    def request_finished(finished: Any, request: Any, blocks: Any) -> Any:
        answer = finished(request, blocks)
        scheduler._reqs_need_recv.pop(request.request_id, None)
        return answer

    wrap(scheduler, "request_finished", request_finished)


def recorded(fault: str, seconds: float = 0.0, connector: str = "nixl-pull") -> str:
    """Run a prefill and a decode engine with this fault. Let `seconds` pass without requests. Return the recording."""
    os.environ["KVFIX_DUMP_DIR"] = tempfile.mkdtemp(prefix="kvfix-test-")
    from kvfix_tools.lab.engine.lab_engine import STEP

    with runner.quiet():
        # With the fixes, decode fails to read blocks whose lease has ended. So apply no fix.
        kvfix.apply("check", only=[])
        now = SimpleNamespace(monotonic_ns=lambda: int(clock.now() * 1e9), time_ns=lambda: int(clock.now() * 1e9))
        recorder.time = now  # type: ignore[attr-defined]
        lease = {"kv_lease_duration": 30}
        pair = late.Pair(Options(connector=connector, num_blocks=40, max_num_batched_tokens=64, extra=lease))
        if fault:
            globals()[fault](pair)
        with suppress(late.EngineDied):
            pair.ask("a", prompt(100), 5)
            pair.ask("b", prompt(150, seed=1), 5)
            pair.step(3)
            pair.ask("c", prompt(60, seed=2), 5)
            pair.step(12)
            pair.on("decode", "take_blocks", 40)
            pair.ask("d", prompt(150, seed=3), 5)
            pair.step(8)
            pair.abort("d")
            pair.on("decode", "free_blocks")
            pair.step(2 + int(seconds / STEP))
        return Path(recorder.write("exit")).read_text()


@pytest.fixture
def files(request: pytest.FixtureRequest, once: Once, tmp_path: Path) -> dict[str, Path]:
    """Return one recorder file for each engine of a pair. A test's parameter has the arguments for `recorded`."""
    text = once(recorded, RELEASES / "0.5.6", *getattr(request, "param", ("",)))
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    files = {}
    for pid, (name, clocks) in enumerate(CLOCKS.items(), 100):
        own = [line for line in lines if line["kind"] == "connector" and str(line.get("engine", "")).startswith(name)]
        numbers = {line["number"] for line in own}
        events = [line for line in lines if line["kind"] == "event" and line["connector"] in numbers]
        files[name] = on_node(tmp_path / f"{name}.jsonl", {**lines[0], "pid": pid}, own, events, name, clocks)
    return files


def peers_of(files: dict[str, Path]) -> Peers:
    return Peers(engine_recordings.engines([recording.read(path) for path in files.values()]))


def test_the_order_comes_from_messages_between_the_engines(files: dict[str, Path]) -> None:
    """According to the wall clocks alone, decode reads before prefill starts."""
    peers = peers_of(files)
    keeps, reads = peers.links[0].keeps, peers.links[0].reads
    assert_between(peers.clock(reads, keeps), CLOCKS["decode"][0] - CLOCKS["prefill"][0])
    for link in peers.links:
        events = [type(entry.event).__name__ for _, entry in peers.history([link])]
        assert events.index("Leased") < events.index("ReadsFrom") < events.index("LeaseEnded")


@pytest.mark.parametrize(
    ("files", "code", "request_id"),
    [
        (("lose_notice", 3.0), "KVR025", "b"),
        (("lose_notice", 40.0), "KVR025", "b"),
        (("lose_aborts", 3.0), "KVR025", "d"),
        (("lose_aborts", 40.0), "KVR025", "d"),
        (("lose_aborts", 40.0, "mooncake"), "KVR025", "d"),
        (("lose_aborts", 0.0), "", ""),  # the lease still runs, so the notice may still come
        (("leases_are_over_at_once", 3.0), "KVR017", "abc"),
    ],
    indirect=["files"],
    ids=str,
)
def test_only_both_recordings_together_show_the_violation(
    files: dict[str, Path], code: str, request_id: str, replayed: Replayed
) -> None:
    found = replayed.violated(files.values())
    assert [(each, request[0]) for each, request in found] == [(code, name) for name in request_id]
    assert not any(replayed.violated([path]) for path in files.values())
    for part in (
        "SUMMARY: kvfix KVR025 lease-not-returned",
        "engine prefill-1.0, scheduler, pid 100 on prefill",
        "engine decode-2.0, scheduler, pid 101 on decode",
    ):
        assert code != "KVR025" or part in replayed.text(files.values(), 1)


@pytest.mark.parametrize(
    ("files", "ended"),
    [
        (("", 0.0, "mooncake"), dict.fromkeys("abcd", False)),
        (("", 40.0, "nixl-push"), {**dict.fromkeys("abc", False), "d": True}),
    ],
    indirect=["files"],
    ids=str,
)
def test_kv_that_prefill_writes_to_decode(files: dict[str, Path], ended: dict[str, bool], replayed: Replayed) -> None:
    """With Mooncake, prefill learns that request d ended in decode. With NIXL push, the lease for request d expires."""
    assert replayed.violated(files.values()) == []
    events = [entry.event for entry in recording.read(files["prefill"]).entries]
    known = [each for each in events if isinstance(each, ev.LeaseEnded) and each.expired is not None]
    assert {each.request[0]: each.expired for each in known} == ended
    peers = peers_of(files)
    assert sorted((link.reader[0], link.kept[0]) for link in peers.links) == [(name, name) for name in "abcd"]
    assert_between(peers.clock(peers.links[0].reads, peers.links[0].keeps), CLOCKS["decode"][0] - CLOCKS["prefill"][0])


def test_a_missing_record_makes_the_lease_unknown(files: dict[str, Path], replayed: Replayed) -> None:
    text = replayed.text([files["decode"], files["decode"]])
    assert "4 requests read blocks of engine prefill-1, but no recording of prefill-1 was given" in text
    lines = files["prefill"].read_text().splitlines()
    ended = [line for line in lines if '"LeaseEnded"' in line]
    files["prefill"].write_text("\n".join(line for line in lines if line not in ended) + "\n")
    assert replayed.violated(files.values()) == []
    assert "kvfix cannot tell whether the blocks were released" in replayed.text(files.values())


@pytest.mark.parametrize("files", [("lose_notice", 3.0)], indirect=True, ids=["lost"])
def test_lines_of_the_routers_log_about_the_request(files: dict[str, Path], tmp_path: Path, replayed: Replayed) -> None:
    router = tmp_path / "router.log"
    router.write_text("Using prefill\nrequest b-00000001: prompt 'secret'\n")
    text = replayed.text(files.values(), 1, router=router)
    assert "The router's log names the request in line 2 of router.log" in text
    assert "secret" not in text
    lines = files["decode"].read_text().splitlines()
    files["decode"].write_text("\n".join(line for line in lines if '"ReadsFrom"' not in line) + "\n")
    out = replayed.text(files.values(), router=router)
    assert "keeps blocks of 4 requests for a peer, but no recorded request reads the blocks" in out
    assert "the router's log names 1 of these requests" in out
    replayed.text(files.values(), 2, router=tmp_path / "none")


def test_ids_of_vllm_contain_the_ids_of_the_router(tmp_path: Path) -> None:
    router = tmp_path / "router.log"
    router.write_text("a\n6f1-22\n6f1-22-7\nb\n")
    log = RouterLog(router)
    assert log.lines("cmpl-6f1-22-0-0a1b2c3d") == log.lines("chatcmpl-6f1-22") == [2, 3]
    assert log.lines("cmpl-6f1-22-7-0-0a1b2c3d") == [3]
    assert log.lines("other") == []
