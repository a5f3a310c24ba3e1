"""Faults planted where the lab plays a real `lmcache server`: in messages, and in a dead, full or silent server."""

from pathlib import Path
from typing import Any

from kvfix_tools.lab.connectors.server_process import L1_OBJECTS
from kvfix_tools.lab.steps import prompt
from tests.lab.planted import fault, row

REAL = ("mp-real",)


def schedule_loads(engine: Any) -> None:
    """A prompt is computed, loaded into other blocks, and hit while vLLM also has it."""
    engine.store("first", prompt(100), max_tokens=3)
    engine.admit("other", prompt(100, seed=1), max_tokens=3)
    engine.serve("again", prompt(100), max_tokens=3)
    engine.serve("both", prompt(100), max_tokens=3)
    engine.settle()
    assert engine.counts["loaded_tokens"] >= 96


LOADS: dict[str, Any] = {"on": REAL, "schedule": schedule_loads}


def _reversed(_: Any, submit: Any, request: str, key: Any, caches: Any, blocks: Any, *rest: Any, **more: Any) -> Any:
    return submit(request, key, caches, [group[::-1] for group in blocks], *rest, **more)


# vLLM has what a lookup has locked, and the server is not asked to release it
row(
    "end_of_a_hit_is_not_sent", "connector.scheduler_adapter.free_lookup_locks", lambda *_, **__: None,
    "KVR009", text="read locks of the server", **LOADS,
)  # fmt: skip
for name, method, found in (
    ("load_goes_to_other_blocks", "submit_retrieve", "the step reads token 0"),
    ("store_takes_other_blocks", "submit_store", "other KV than that of tokens 0 on is stored"),
):
    row(name, f"workers.0.adapter.transfer_ctx.{method}", _reversed, "LAB001", text=found, **LOADS)


def begin_load_and_store(engine: Any) -> None:
    """Until both are to be sent; what was stored before is on the server's disk."""
    engine.serve("first", prompt(128))
    engine.connector.server.process.locks()  # waits until it has written
    engine.reset_prefix_cache()
    engine.admit("loads", prompt(140))
    engine.admit("stores", prompt(160, seed=1))
    server = engine.connector.server
    while not (server.loading and server.storing["stores"]):
        engine.step()


def ask_again(engine: Any, tokens: int) -> None:
    """vLLM itself has nothing of the prompt."""
    engine.reset_prefix_cache()
    engine.serve("again", prompt(tokens), max_tokens=3)
    engine.settle()


def schedule_killed(engine: Any) -> None:
    """The server is killed while a load and a store are to be sent, and started again: what is on its disk is hit."""
    begin_load_and_store(engine)
    engine.connector.server_dies()
    engine.step(2)
    engine.connector.server_comes_back()
    engine.run()
    ask_again(engine, 128)
    assert engine.counts["server_restarts"] == 1


row(
    "a_load_from_a_dead_server_counts_as_done", "workers.0.adapter.get_block_ids_with_load_errors", lambda *_: set(),
    "LAB001", text="the step reads", on=REAL, schedule=schedule_killed, every={"delay": 3},
)  # fmt: skip


def schedule_filled(engine: Any) -> None:
    """Others are stored until the server is full and evicts the first chunks by itself; they are not on its disk."""
    server = engine.connector.server
    engine.serve("first", prompt(100))
    for seed in range(1, 7):
        engine.serve(f"other {seed}", prompt(320, seed=seed))
    # it evicts down to four fifths
    server.process.until(lambda: server.process.locks()["objects"] <= L1_OBJECTS * 4 // 5)
    engine.settle()
    assert engine.counts["evicted_by_server"]
    server.empty_disk()
    ask_again(engine, 100)


CHECK = "connector.scheduler_adapter.check_lookup_result"


@fault("LAB002", text="loaded up to 0 of 96", on=REAL, at=CHECK, schedule=schedule_filled)
def what_the_server_has_evicted_counts_as_hit(_: Any, check: Any, name: str) -> int | None:
    found: int | None = check(name)
    return 96 if name == "again" and found is not None else found


def schedule_unanswered(engine: Any) -> None:
    """A lookup of cached chunks is not answered in time."""
    engine.store("first", prompt(100))
    engine.do("lookups_fail", 1)
    engine.serve("again", prompt(100), max_tokens=3)
    engine.expect_all_ended()
    assert engine.counts["lookups_unanswered"] == 1


@fault("LAB003", text="is WAITING for ever", on=REAL, at=CHECK, schedule=schedule_unanswered)
def a_lookup_that_times_out_is_waited_for(engine: Any, check: Any, name: str) -> Any:
    return None if name in engine.connector.server.unanswered_lookups else check(name)


def schedule_disk(engine: Any) -> None:
    """Evicted chunks are read from the server's disk."""
    engine.serve("first", prompt(100))
    engine.settle()
    engine.connector.server.process.locks()  # it is on the disk
    engine.evict(100)
    ask_again(engine, 100)
    assert engine.counts["read_from_disk"] == 6


@fault("LAB001", text="the step reads", on=REAL, at="evict", schedule=schedule_disk)
def files_on_the_disk_are_mixed_up(engine: Any, evict: Any, chunks: int) -> None:
    server = engine.connector.server
    files = sorted(file for file in Path(server.process.disk).rglob("*") if server.model_name in file.name)
    assert len(files) == 6
    for file, contents in zip(files, [file.read_bytes() for file in reversed(files)], strict=True):
        file.write_bytes(contents)
    evict(chunks)
