"""Two engines with NixlConnector that have not as many ranks, or several KV groups: clean as they are, and wrong KV of
any head or group is found."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from kvfix_tools.lab.options import WITH_RANKS, Options
from kvfix_tools.lab.steps import prompt
from tests.conftest import RELEASES, Once
from tests.lab.planted_in_pairs import COPIED, FAULTS, FEWER, GROUPS, MORE


def played(connector: str, ranks: dict[str, Any], planted: str = "") -> dict[str, Any]:
    """Requests; then others take and write the prefill engine's free blocks in each of some steps."""
    from kvfix_tools.lab import runner
    from kvfix_tools.lab.engine.lab_engine import EngineDied
    from kvfix_tools.lab.pair.pair import Pair

    options = Options(connector=connector, max_num_batched_tokens=64, **{"num_blocks": 40, **ranks})
    with runner.applied(True):
        pair = Pair(options)
        if planted:
            FAULTS[planted].plant(pair)
        with suppress(EngineDied):
            pair.ask("a", prompt(100), 5)
            pair.ask("b", prompt(150), 5)
            pair.step(3)
            pair.ask("c", prompt(60, seed=1), 5)
            pair.step(3)
            for number in range(12):  # an engine without requests makes no step
                pair.ask(f"other-{number}", prompt(40, seed=2 + number))
                pair.on("prefill", "take_blocks", pair.prefill.free())
                pair.step()
                pair.on("prefill", "free_blocks")
            pair.run()
            pair.expect_all_ended()
        pair.close()
    return {"found": [str(each) for each in pair.findings], "counts": dict(pair.counts)}


@pytest.mark.parametrize("connector", WITH_RANKS)
@pytest.mark.parametrize("ranks", [MORE, FEWER], ids=["more", "fewer"])
def test_without_a_fault(connector: str, ranks: dict[str, Any], once: Once) -> None:
    done = once(played, RELEASES / "0.5.6", connector, ranks)
    assert done["found"] == []
    assert done["counts"]["leases"] == 3 + 12
    assert done["counts"]["loaded_tokens"] >= 310 - 96
    assert done["counts"]["ranks_apart"]


def test_with_copied_heads(once: Once) -> None:
    done = once(played, RELEASES / "0.5.6", "nixl-pull", COPIED)
    assert done["found"] == []
    assert done["counts"]["loads_with_copied_heads"]


@pytest.mark.parametrize("connector", WITH_RANKS)
def test_with_several_groups(connector: str, once: Once) -> None:
    done = once(played, RELEASES / "0.5.6", connector, GROUPS)
    assert done["found"] == []
    assert done["counts"]["loads_with_one_window"] >= 3


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, once: Once) -> None:
    planted = FAULTS[name]
    found = once(played, RELEASES / "0.5.6", planted.connector, planted.options, name)["found"]
    assert any(each.startswith("LAB001") and planted.text in each for each in found), found


def drawn(connector: str) -> dict[str, Any]:
    """The first seeds that have several ranks, and several KV groups."""
    from kvfix_tools.lab.fuzz.fuzz import play
    from kvfix_tools.lab.fuzz.schedule import draw
    from kvfix_tools.lab.runner import applied

    counts, found = Counter[str](), []
    schedules = [draw(seed, connector) for seed in range(150)]
    ranks = [each for each in schedules if each.options.peer_ranks]
    groups = [each for each in schedules if each.options.windows]
    with applied(True, "check"):
        for schedule in ranks[:24] + groups[:12]:
            done = play(schedule)
            counts.update(done.counts)
            found += [str(violation) for violation in done.violations]
    return {"violations": found, "counts": counts}


@pytest.mark.parametrize("connector", WITH_RANKS)
def test_all_that_is_drawn_happens(connector: str, once: Once) -> None:
    done = once(drawn, RELEASES / "0.5.6", connector)
    assert done["violations"] == []
    counts = done["counts"]
    loads = "more_ranks", "fewer_ranks", "late_rank", "copied_heads", "one_window", "two_windows"
    happened = "failed_on_one_rank", *(f"loads_with_{each}" for each in loads)
    assert [each for each in happened if not counts[each]] == []
