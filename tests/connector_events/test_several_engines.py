"""Threads, forks, several engines in one process: each has its own record. Spawned processes: tests/engine."""

import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import kvfix
from kvfix.session import session
from kvfix_tools import recording
from kvfix_tools.lab.fuzz.schedule import draw
from tests import late

#: Seeds of plain schedules: two engines.
SEEDS = (3, 5)


def play_all() -> dict[str, Any]:
    os.environ["KVFIX_DUMP_DIR"] = tempfile.mkdtemp(prefix="kvfix-test-")
    kvfix.apply("check")
    alone = [events_of(played) for played in (play(seed) for seed in SEEDS)]
    return {
        "alone": [len(events) for events in alone],
        "threads": in_threads() == alone,
        "in turn": in_turn() == alone,
        "forked": forked(alone[0]),
        "logged": [line for line in session.reported if "applied" not in line],
    }


def create(seed: int) -> Any:
    schedule = draw(seed, "v1", plain=True)
    return late.LabEngine(schedule.options), schedule


def run(made: Any) -> Any:
    engine, schedule = made
    for step in schedule.steps:
        late.move(engine, step)
    return finish(made)


def finish(made: Any) -> Any:
    engine, schedule = made
    engine.free_blocks()
    engine.budget(schedule.options.max_num_batched_tokens)
    engine.run()
    return engine


def play(seed: int) -> Any:
    return run(create(seed))


def events_of(engine: Any) -> list[str]:
    """The recorded events of this engine in the scheduler role."""
    from kvfix.connector_events import recorder

    watched = engine.scheduler.connector.__dict__["_kvfix_watched"]
    return [repr(entry.event) for entry in recorder.snapshot() if entry.connector == watched.number]


def in_threads() -> list[list[str]]:
    """Created one after the other (LMCache has one configuration per process), then run at the same time."""
    made = [create(seed) for seed in SEEDS]
    threads = [threading.Thread(target=run, args=(each,)) for each in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [events_of(engine) for engine, _ in made]


def in_turn() -> list[list[str]]:
    made = [create(seed) for seed in SEEDS]
    for number in range(max(len(schedule.steps) for _, schedule in made)):
        for engine, schedule in made:
            if number < len(schedule.steps):
                late.move(engine, schedule.steps[number])
    from kvfix.connector_events import dump

    assert dump.scheduler_state() == {}, "with two schedulers the state is ambiguous"
    return [events_of(finish(each)) for each in made]


def forked(alone: list[str]) -> dict[str, Any]:
    """The parent's engine continues in the parent, and the child runs its own."""
    from kvfix.connector_events import dump

    made = create(SEEDS[0])
    before = len(session.events)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        began_with = len(session.events)
        own = events_of(play(SEEDS[0]))
        written = recording.read(Path(dump.write("exit")))
        child = {
            "began with": began_with,
            "same": own == alone,
            "only its own": {entry.connector for entry in written.entries} <= set(written.connectors),
            "pid": written.head["pid"] == os.getpid(),
            "ready": bool(list(Path(os.environ["KVFIX_DUMP_DIR"]).rglob(f"kvfix-{os.getpid()}.ready"))),
        }
        os.write(write, json.dumps(child).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    child = json.loads(os.read(read, 1 << 16))
    return {**child, "parent goes on": events_of(run(made)) == alone, "parent had": before > 0}


def test_two_engines_of_one_process(outcomes: dict[str, Any]) -> None:
    assert min(outcomes["alone"]) > 20
    assert outcomes["in turn"]
    assert outcomes["threads"]


def test_a_fork_has_its_own_record(outcomes: dict[str, Any]) -> None:
    """The child starts with an empty record. The parent's engine continues."""
    assert outcomes["forked"].pop("began with") == 0
    assert all(outcomes["forked"].values()), outcomes["forked"]


def test_no_engine_has_a_finding(outcomes: dict[str, Any]) -> None:
    assert [line for line in outcomes["logged"] if " acted: " not in line] == []
