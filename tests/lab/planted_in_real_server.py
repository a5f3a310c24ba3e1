"""Plant faults in the messages to a real `lmcache server`. In some cases the server is dead, full or silent."""

from pathlib import Path
from typing import Any

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.connectors.server_process import L1_OBJECTS
from kvfix_tools.lab.steps import prompt
from tests.lab.planted import counted, fault, row, steps, until

REAL = ("mp-real",)
#: `first` stores a prompt. `again` loads the KV into other blocks. `both` hits the server and vLLM's own cache.
LOADED = steps(
    [do.store("first", prompt(100), max_tokens=3), do.admit("other", prompt(100, seed=1), max_tokens=3)],
    [do.serve("again", prompt(100), max_tokens=3), do.serve("both", prompt(100), max_tokens=3), do.settle()],
    counted("loaded_tokens", 96),
)
LOADS: dict[str, Any] = {"on": REAL, "schedule": LOADED}


def _reversed(_: Any, submit: Any, request: str, key: Any, caches: Any, blocks: Any, *rest: Any, **more: Any) -> Any:
    return submit(request, key, caches, [group[::-1] for group in blocks], *rest, **more)


# a lookup also locks chunks that vLLM's own cache has. With this fault, no call asks the server to free these locks
row(
    "end_of_a_hit_is_not_sent", "connector.scheduler_adapter.free_lookup_locks", lambda *_, **__: None,
    "KVR009 read locks of the server", **LOADS,
)  # fmt: skip
for name, method, found in (
    ("load_goes_to_other_blocks", "submit_retrieve", "the step reads token 0"),
    ("store_takes_other_blocks", "submit_store", "the chunk that begins at token 0 is stored with wrong KV"),
):
    row(name, f"workers.0.adapter.transfer_ctx.{method}", _reversed, f"LAB001 {found}", **LOADS)


def on_disk(engine: Any) -> None:
    """Wait until the server has written to its disk."""
    engine.connector.server.process.locks()


def again(tokens: int) -> list[do.Step]:
    return [do.reset_prefix_cache(), do.serve("again", prompt(tokens), max_tokens=3), do.settle()]


#: Stop the schedule before the worker sends a load and a store. The server's disk has the prompt of "first".
begin_load_and_store = steps(
    [do.serve("first", prompt(128)), on_disk, do.reset_prefix_cache()],
    [do.admit("loads", prompt(140)), do.admit("stores", prompt(160, seed=1))],
    until(lambda engine: engine.connector.server.loading and engine.connector.server.storing["stores"]),
)
#: Kill the server before the worker sends a load and a store, then restart the server. A request then hits the disk.
KILLED = steps(
    [begin_load_and_store, do.server_dies(), do.step(2), do.server_comes_back(), do.run()],
    [again(128), counted("server_restarts", 1, 1)],
)
row(
    "a_load_from_a_dead_server_counts_as_done", "workers.0.adapter.get_block_ids_with_load_errors", lambda *_: set(),
    "LAB001 the step reads", on=REAL, schedule=KILLED, every={"delay": 3},
)  # fmt: skip


def evicts(engine: Any) -> None:
    """Wait until evictions leave L1, the server's cache in memory, at most four fifths full."""
    process = engine.connector.server.process
    process.until(lambda: process.locks()["objects"] <= L1_OBJECTS * 4 // 5)


#: Store other prompts until the full server evicts the chunks of the first prompt. Then empty the disk.
FILLED = steps(
    do.serve("first", prompt(100)),
    [do.serve(f"other {seed}", prompt(320, seed=seed)) for seed in range(1, 7)],
    [evicts, do.settle(), counted("evicted_by_server", 1), lambda engine: engine.connector.server.empty_disk()],
    again(100),
)
CHECK = "connector.scheduler_adapter.check_lookup_result"


@fault("LAB002 loaded up to token 0, but promised up to 96", on=REAL, at=CHECK, schedule=FILLED)
def what_the_server_has_evicted_counts_as_hit(_: Any, check: Any, name: str) -> int | None:
    found: int | None = check(name)
    return 96 if name == "again" and found is not None else found


#: The server does not answer a lookup of cached chunks in time.
UNANSWERED = steps(
    [do.store("first", prompt(100)), do.lookups_fail(1), do.serve("again", prompt(100), max_tokens=3)],
    [do.expect_all_ended(), counted("lookups_unanswered", 1, 1)],
)
row(
    "a_lookup_that_times_out_is_waited_for", CHECK,
    lambda engine, check, name: None if name in engine.connector.server.unanswered_lookups else check(name),
    "LAB003 is WAITING for ever", on=REAL, schedule=UNANSWERED,
)  # fmt: skip
FROM_DISK = steps(
    do.serve("first", prompt(100)), do.settle(), on_disk, do.evict(100), again(100), counted("read_from_disk", 6, 6)
)


@fault("LAB001 the step reads", on=REAL, at="evict", schedule=FROM_DISK)
def files_on_the_disk_are_mixed_up(engine: Any, evict: Any, chunks: int) -> None:
    server = engine.connector.server
    files = sorted(file for file in Path(server.process.disk).rglob("*") if server.model_name in file.name)
    assert len(files) == 6
    for file, contents in zip(files, [file.read_bytes() for file in reversed(files)], strict=True):
        file.write_bytes(contents)
    evict(chunks)
