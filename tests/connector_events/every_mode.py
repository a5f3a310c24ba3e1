"""Plays every mode on the real scheduler with LMCache 0.3.10, which has the reported bug."""

from __future__ import annotations

import inspect
import json
import os
import signal
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import kvfix
from kvfix_tools.lab.scenario import find


def play_all(path: str) -> dict[str, Any]:
    """Recorder files and reports stay in the folder of this path."""
    folder, scenario = Path(path), find("mismatch-in-tokens-to-load")
    assert scenario is not None
    answer: dict[str, Any] = {}
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory
    from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1 as connector
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvfix_tools.lab.engine.lab_engine import EngineDied, LabEngine

    wrapped = [(connector, name) for name in ("get_num_new_matched_tokens", "build_connector_meta", "get_finished")]
    wrapped += [(Scheduler, "schedule")]
    wrapped += [(connector, name) for name in ("save_kv_layer", "wait_for_layer_load")]
    originals = [vars(owner)[name] for owner, name in wrapped]
    signatures = [inspect.signature(function) for function in originals]
    get_class = vars(factory)["get_connector_class"]

    def play(mode: str | None, name: str, only: list[str] | None = None, **environment: str) -> Any:
        """How the engine ended, its events, and the files in the folder."""
        kvfix.revert()
        place = folder / name / f"kvfix-{os.getuid()}"
        os.environ.update(KVFIX_DUMP_DIR=str(place.parent), **environment)
        if mode:
            kvfix.apply(mode, only=[] if only is None else only)
        died = ""
        world = LabEngine(scenario.options)
        try:
            scenario.play(world)
        except EngineDied as error:
            died = str(error)
        for key in environment:
            del os.environ[key]
        files = sorted(place.iterdir()) if place.is_dir() else []
        return {
            "died": died,
            "files": [path.suffix for path in files],
            "folder": oct(stat.S_IMODE(place.stat().st_mode)) if files else "",
            "modes": sorted({oct(stat.S_IMODE(path.stat().st_mode)) for path in files}),
            "events": [[step, *event] for step, event in world.log],
        }

    def now() -> list[bool]:
        return [vars(owner)[name] is original for (owner, name), original in zip(wrapped, originals, strict=True)]

    answer["alone"] = play(None, "alone")
    answer["fix"] = play("fix", "fix")
    answer["fix is unwrapped"] = now()
    answer["observe"] = play("observe", "observe")
    answer["observe is unwrapped"] = now()
    answer["same signatures"] = [
        inspect.signature(vars(owner)[name]) == signature
        for (owner, name), signature in zip(wrapped, signatures, strict=True)
    ]
    answer["bounded"] = bounded(play, folder)
    answer["check"] = play("check", "check")
    answer["strict"] = play("strict", "strict")
    listed = folder / "known"
    listed.write_text("# known\nKVR002 promised 256 where*\nKVR011\n")
    answer["suppressed"] = play("check", "suppressed", KVFIX_SUPPRESS=str(listed))
    answer["fixed"] = play("strict", "fixed", ["KVF001"])
    kvfix.revert()
    answer["reverted"] = now(), vars(factory)["get_connector_class"] is get_class
    answer["signal is free"] = signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    signal.signal(signal.SIGUSR2, theirs)
    play("observe", "taken")
    answer["taken signal is theirs"] = signal.getsignal(signal.SIGUSR2) is theirs
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    kvfix.revert()
    with suppress(FileNotFoundError):
        answer["ready left"] = [path.name for path in folder.rglob("*.ready")]
    return answer


def theirs(*_: Any) -> None:
    """A signal handler of another tool."""


def bounded(play: Any, folder: Path) -> Any:
    """The size of a recorder file after too many events, and the number of files kept."""
    play("observe", "bounded")
    from kvfix.connector_events import dump, recorder
    from kvfix.ledger import events
    from kvfix.session import EVENTS, session

    for number in range(3 * EVENTS):
        recorder.add(1, "planted", events.Granted("r" * 100, number))
    with mock.patch.object(dump, "LARGEST", 200_000):
        for _ in range(dump.FILES + 3):
            path = dump.write("signal")
    last = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return {
        "entries": len(session.events),
        "bytes": Path(path).stat().st_size,
        "last": last[-1]["external"] == 3 * EVENTS - 1,
        "files": len(list((folder / "bounded").rglob("*.jsonl"))),
    }
