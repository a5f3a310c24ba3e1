"""The records of the lab's prefill and decode engine together: blocks that one engine keeps for the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvfix.ledger import events as ev
from kvfix_tools import engine_recordings, recording, replay
from kvfix_tools.peer_recordings import Peers, RouterLog
from tests.conftest import RELEASES, Once
from tests.connector_events.pair_recorded import CLOCKS, recorded, split


@pytest.fixture
def files(request: pytest.FixtureRequest, once: Once, tmp_path: Path) -> dict[str, Path]:
    return split(once(recorded, RELEASES / "0.5.6", *request.param), tmp_path)


def violated(paths: list[Path], capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    capsys.readouterr()
    code = replay.replay(paths, json=True)
    answer: Any = json.loads(capsys.readouterr().out)
    rows = answer if isinstance(answer, list) else [answer]
    found = [
        (each["code"], each["request"]) for row in rows for each in row["findings"] if each["verdict"] == "violated"
    ]
    assert code == int(bool(found))
    return found


def alone(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    return [found for path in files.values() for found in violated([path], capsys)]


def peers_of(files: dict[str, Path]) -> Peers:
    return Peers(engine_recordings.engines([recording.read(path) for path in files.values()]))


@pytest.mark.parametrize("files", [("nothing",)], indirect=True, ids=["healthy"])
def test_what_is_kept_is_given_back(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Every lease has its reader, is renewed while that waits, and ends after its notice."""
    assert violated(list(files.values()), capsys) == []
    prefill = recording.read(files["prefill"])
    kinds = {
        kind: [e.event for e in prefill.entries if isinstance(e.event, kind)] for kind in (ev.Leased, ev.LeaseEnded)
    }
    assert [each.request[0] for each in kinds[ev.Leased]] == ["a", "b", "c", "d"]
    assert {each.seconds for each in kinds[ev.Leased]} == {30}
    of_worker = [each for each in kinds[ev.LeaseEnded] if each.expired is not None]
    assert [(each.request[0], each.expired) for each in of_worker] == [(name, False) for name in "abcd"]
    peers = peers_of(files)
    assert sorted((link.reader[0], link.kept[0]) for link in peers.links) == [(name, name) for name in "abcd"]
    assert all(link.reader != link.kept for link in peers.links)
    prefill_engine = next(each for each in peers.engines if each.name.startswith("prefill"))
    assert peers.unread(prefill_engine) == set()


@pytest.mark.parametrize("files", [("nothing",)], indirect=True, ids=["healthy"])
def test_the_order_comes_from_what_they_have_told_each_other(files: dict[str, Path]) -> None:
    """Their wall clocks would have decode read before prefill has begun."""
    peers = peers_of(files)
    keeps, reads = peers.links[0].keeps, peers.links[0].reads
    clock = peers.clock(reads, keeps)
    assert clock.low is not None
    assert clock.high is not None
    true = int((CLOCKS["decode"][0] - CLOCKS["prefill"][0]) * 1e9)
    assert clock.low <= true <= clock.high
    assert clock.low <= clock.ahead <= clock.high
    for link in peers.links:
        events = [type(entry.event).__name__ for _, entry in peers.history([link])]
        assert events.index("Leased") < events.index("ReadsFrom") < events.index("LeaseEnded")


@pytest.mark.parametrize(
    ("files", "request_id"),
    [
        (("lose_notice", 3.0), "b"),
        (("lose_notice", 40.0), "b"),
        (("lose_aborts", 3.0), "d"),
        (("lose_aborts", 40.0), "d"),
        (("lose_aborts", 40.0, "mooncake"), "d"),
    ],
    indirect=["files"],
    ids=["read, kept", "read, over", "aborted, kept", "aborted, over", "Mooncake"],
)
def test_a_lease_that_is_not_given_back(
    files: dict[str, Path], request_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only both files together show it."""
    ((code, request),) = violated(list(files.values()), capsys)
    assert (code, request[0]) == ("KVR025", request_id)
    assert alone(files, capsys) == []
    assert replay.replay(list(files.values()), json=False) == 1
    text = capsys.readouterr().out
    assert "SUMMARY: kvfix KVR025 lease-not-returned" in text
    assert "engine prefill-1.0, scheduler, pid 100 on prefill" in text
    assert "engine decode-2.0, scheduler, pid 101 on decode" in text


@pytest.mark.parametrize(
    ("files", "ended"),
    [
        (("nothing", 0.0, "mooncake"), dict.fromkeys("abcd", False)),
        (("nothing", 40.0, "nixl-push"), {**dict.fromkeys("abc", False), "d": True}),
    ],
    indirect=["files"],
    ids=["Mooncake", "NIXL push"],
)
def test_what_is_written_to_decode(
    files: dict[str, Path], ended: dict[str, bool], capsys: pytest.CaptureFixture[str]
) -> None:
    """Mooncake's prefill is notified of ended requests. NIXL's in push mode keeps the blocks until the lease ends."""
    assert violated(list(files.values()), capsys) == []
    ends = [entry.event for entry in recording.read(files["prefill"]).entries if isinstance(entry.event, ev.LeaseEnded)]
    assert {each.request[0]: each.expired for each in ends if each.expired is not None} == ended
    peers = peers_of(files)
    assert sorted((link.reader[0], link.kept[0]) for link in peers.links) == [(name, name) for name in "abcd"]
    clock = peers.clock(peers.links[0].reads, peers.links[0].keeps)
    assert clock.low is not None
    assert clock.high is not None


@pytest.mark.parametrize("files", [("lose_aborts", 0.0)], indirect=True, ids=["at once"])
def test_a_notice_may_be_on_its_way(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert violated(list(files.values()), capsys) == []


@pytest.mark.parametrize("files", [("leases_are_over_at_once", 3.0)], indirect=True, ids=["over"])
def test_a_read_after_prefill_freed(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = violated(list(files.values()), capsys)
    assert {code for code, _ in found} == {"KVR017"}
    assert alone(files, capsys) == []


@pytest.mark.parametrize("files", [("nothing",)], indirect=True, ids=["healthy"])
def test_what_is_not_on_record_is_unknown(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.replay([files["decode"], files["decode"]], json=False) == 0
    assert "4 requests read blocks of engine prefill-1, of which no recording was given" in capsys.readouterr().out
    lines = files["prefill"].read_text().splitlines()
    ended = [line for line in lines if '"LeaseEnded"' in line]
    files["prefill"].write_text("\n".join(line for line in lines if line not in ended) + "\n")
    assert violated(list(files.values()), capsys) == []
    replay.replay(list(files.values()), json=False)
    assert "kvfix cannot tell whether the blocks were released" in capsys.readouterr().out


@pytest.mark.parametrize("files", [("lose_notice", 3.0)], indirect=True, ids=["lost"])
def test_the_routers_log_says_where_it_names_the_request(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router = tmp_path / "router.log"
    router.write_text("Using prefill\nrequest b-00000001: prompt 'secret'\n")
    assert replay.replay(list(files.values()), json=False, router=router) == 1
    text = capsys.readouterr().out
    assert "The router's log names the request in line 2 of router.log" in text
    assert "secret" not in text
    lines = files["decode"].read_text().splitlines()
    files["decode"].write_text("\n".join(line for line in lines if '"ReadsFrom"' not in line) + "\n")
    assert replay.replay(list(files.values()), json=False, router=router) == 0
    out = capsys.readouterr().out
    assert "4 requests have blocks kept for a peer, and no request on record reads them" in out
    assert "the router's log names 1 of them" in out
    assert replay.replay(list(files.values()), json=False, router=tmp_path / "none") == 2


def test_ids_of_vllm_have_the_routers_in_them(tmp_path: Path) -> None:
    router = tmp_path / "router.log"
    router.write_text("a\n6f1-22\n6f1-22-7\nb\n")
    log = RouterLog(router)
    assert log.lines("cmpl-6f1-22-0-0a1b2c3d") == log.lines("chatcmpl-6f1-22") == [2, 3]
    assert log.lines("cmpl-6f1-22-7-0-0a1b2c3d") == [3]
    assert log.lines("other") == []
