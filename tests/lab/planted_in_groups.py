"""Faults planted in an engine of the lab with several KV groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvfix_tools.lab.steps import prompt
from tests.lab.planted import fault, wrap

#: `mp` with KV groups of sliding windows, in separate objects.
WINDOWS = ("mp-windows",)
#: `mp` with a KV group of states.
STATES = ("mp-states",)
#: All KV groups of a chunk in one object of the server.
ONE_OBJECT: dict[str, Any] = {"separate_object_groups": False, "windows": (32,)}
#: A window whose blocks have twice the tokens.
LARGER_BLOCKS: dict[str, Any] = {"windows": (64,), "window_blocks": 2}
#: States, and a drafter.
STATES_AND_DRAFTS: dict[str, Any] = {"drafter": "mtp", "drafts": 3, "acceptance": 50}


def _change_blocks(engine: Any, name: str, changed: Callable[[Any], Any]) -> None:
    """Change the blocks of each transfer of the server: `load`, or `read` for a store."""

    def transfer(original: Any, *arguments: Any) -> Any:
        place = 0 if name == "load" else 1
        return original(*arguments[:place], changed(arguments[place]), *arguments[place + 1 :])

    wrap(engine.connector.server.chunks, name, transfer)


@fault("LAB001", text="computed ones, its slot holds other KV in KV group 1", on=WINDOWS)
def load_of_a_window_goes_to_blocks_of_another(engine: Any) -> None:
    _change_blocks(engine, "load", lambda groups: [groups[0], groups[2], groups[1]])


@fault("LAB001", text="is stored under their key", on=WINDOWS)
def store_of_a_window_reads_other_blocks(engine: Any) -> None:
    _change_blocks(engine, "read", lambda groups: [groups[0], groups[2], groups[1]])


@fault("LAB001", text="computed ones, its slot holds other KV in KV group 1", on=STATES)
def load_of_a_state_goes_to_the_block_before(engine: Any) -> None:
    _change_blocks(engine, "load", lambda groups: [groups[0], [*groups[1][1:], 0]])


@fault("LAB001", text="is stored under their key", on=STATES)
def store_takes_the_state_for_that_of_the_chunk_before(engine: Any) -> None:
    _change_blocks(engine, "read", lambda groups: [groups[0], [*groups[1][1:], 0]])


@fault("LAB001", text="in KV group 1", on=WINDOWS, mp_windows=ONE_OBJECT)
def part_of_a_group_is_read_from_blocks_of_another(engine: Any) -> None:
    _change_blocks(engine, "load", lambda groups: [groups[0], [*groups[1][1:], 0]])


def schedule_failed_load(engine: Any) -> None:
    engine.do("stored_elsewhere", prompt(128))
    engine.admit("r", prompt(160), max_tokens=5)
    engine.fail_load("r")
    engine.run()


@fault("LAB003", "LAB008", "KVR010", on=WINDOWS, schedule=schedule_failed_load)
def a_failed_load_of_groups_is_not_reported(engine: Any) -> None:
    engine.workers[0].also_reported = dict


@fault("LAB001", text="is stored under their key", on=WINDOWS, mp_windows=LARGER_BLOCKS)
def larger_blocks_are_taken_for_small_ones(engine: Any) -> None:
    engine.scheduler.connector._group_tokens_per_block = [16, 16]


@fault("LAB001", text="in KV group 1", on=STATES, mp_states=STATES_AND_DRAFTS)
def state_of_a_rejected_draft_is_read(engine: Any) -> None:
    def write(original: Any, name: str, done: int, contents: list[int], drafts: int, accepted: int) -> None:
        original(name, done, contents, drafts, min(drafts, accepted + 1))

    wrap(engine.model.groups[0], "write", write)
