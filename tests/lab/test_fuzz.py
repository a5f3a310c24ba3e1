"""Test the fuzzer. Schedules without faults violate no rule, drawn options take effect, wrong options are refused."""

import gc
import json
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvfix_tools.lab import cli, releases
from kvfix_tools.lab.options import SERVER_CHUNK, WITH_RANKS, Options
from tests import late
from tests.conftest import RELEASES, Fresh, Once, answers
from tests.diagnose.lines import site_packages
from tests.healthy import own_blocks

#: The only finding of schedules without faults, with v1 and LMCache 0.5.6. The bug also has a scenario.
KNOWN = re.compile(r"KVR009 state-left-behind \S+: _requests_priority still holds it")

#: Counters that stay 0 without a real server.
SERVER = {"server_restarts", "evicted_by_server", "read_from_disk"}


def without(*features: str) -> set[str]:
    return {f"{what}_with_{feature}" for feature in features for what in ("loads", "stores")}


#: Features of models with several KV groups.
GROUPS = ("one_window", "two_windows", "larger_blocks", "states", "states_and_drafts", "one_object", "separate_objects")
#: Counters of pairs of engines whose numbers of ranks differ.
PAIRS = without("more_ranks", "fewer_ranks", "copied_heads")
#: Counters that stay 0, by connector. For example, a kv_consumer stores nothing (lmcache_mp_connector.py 0.5.6:608),
#: v1 has one KV group and no server, and the lab plays OffloadingConnector in one role.
NEVER = {
    "v1": {
        "loads_of_groups", "stores_of_groups", "null_objects_left_out", "ranks_apart", "stores_of_kv_consumer",
        "server_stops", "loads_of_groups_failed", *SERVER, *without(*GROUPS, "context"), *PAIRS,
    },
    "mp": {
        "loads_partial", "ids_used_again", "loaded_beside", "stores_for_decoder", "not_to_store",
        "stores_of_kv_consumer", *SERVER, *without("layers", "fetch_ahead"), *PAIRS,
    },
    "offloading": {
        "stores_of_kv_consumer", "stores_of_kv_producer", "loads_of_kv_consumer", "loads_of_kv_producer",
        "stores_for_decoder", "server_stops", "lookups_unanswered", "null_objects_left_out", "loads_partial",
        "ids_used_again", "loaded_beside", "passed_over", "ranks_differ", *SERVER, *PAIRS,
        *without("layers", "fetch_ahead", "multi_connector", "context"),
        *without("states", "states_and_drafts", "separate_objects"),
    },
}  # fmt: skip
#: Connectors whose counters must match NEVER. Only offloading needs fixes: without them a failed copy ends the worker.
CONNECTORS = ["v1", "mp", "offloading"]
#: Counters that may stay 0. With OffloadingConnector, a session rarely makes other requests wait for ever.
RARE = {"locked_out_by_session", "aborted_loading"}


def ran(connector: str, seeds: range, fixes: bool = False, plain: bool = False, **more: Any) -> Any:
    """Play the schedules of these seeds. By default, do not shorten schedules with violations. more: see `fuzz`."""
    return late.fuzz(late.Run(connector, fixes, plain), seeds, inf, **{"shrinking": 0, **more})


def play_all() -> dict[str, Any]:
    own_blocks()
    plain = {name: ran(name, range(30), False, True).as_json() for name in CONNECTORS}
    happened = {name: ran(name, range(60), name == "offloading").counts for name in CONNECTORS}
    gc.collect()
    return {
        "plain": plain,
        "happened": happened,
        "engines": sum(type(each) is late.LabEngine for each in gc.get_objects()),
        "nothing": ran("v1", range(0)).tested_nothing,
        "jobs": [_counts(ran("v1", range(40), jobs=jobs)) for jobs in (1, 2)],
        "resumed": _resumed(),
        "shrunk": [len(each.schedule.steps) for each in ran("v1", range(3), shrinking=inf).violations],
    }


def _counts(done: Any) -> list[Any]:
    return [done.steps, done.counts, [[each.times, each.seed, each.message] for each in done.violations]]


def _resumed() -> dict[str, Any]:
    """Stop a run after some seeds. Continue the run from its notes file. Return the numbers of seeds, and counts."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes.json")
        stopped, whole = ran("v1", range(40), most=1, notes=notes), ran("v1", range(40), notes=notes)
        with pytest.raises(ValueError, match="with different options: remove it or name"):
            ran("mp", range(40), notes=notes)
    return {"seeds": [stopped.seeds, whole.seeds], "counts": _counts(whole)}


@pytest.mark.parametrize("connector", CONNECTORS)
def test_plain_schedules_are_clean_and_have_tested_something(connector: str, outcomes: dict[str, Any]) -> None:
    plain = outcomes["plain"][connector]
    assert (plain["tested_nothing"], plain["seeds"]) == ("", 30)
    found = [each["message"] for each in plain["violations"]]
    assert [each for each in found if connector != "v1" or not KNOWN.fullmatch(each)] == []


def test_two_processes_find_what_one_does(outcomes: dict[str, Any]) -> None:
    one, two = outcomes["jobs"]
    assert one == two
    assert one[2], "the fuzzer found no violation"


def test_a_run_that_was_stopped_goes_on(outcomes: dict[str, Any]) -> None:
    assert outcomes["resumed"]["seeds"] == [32, 40]
    assert outcomes["resumed"]["counts"] == outcomes["jobs"][0]


def test_a_run_that_tested_nothing_says_so(outcomes: dict[str, Any]) -> None:
    assert outcomes["nothing"] == "loaded no token, stored no token, preempted no request, never filled the blocks"


@answers(1)
def test_a_violation_outweighs_a_run_that_tested_nothing() -> int:
    """Without fixes, seed 1 violates a rule, but stores no token."""
    command = ["fuzz", "--connector", "v1", "--seeds", "1", "--no-fixes", "--shrink", "0"]
    return CliRunner().invoke(cli.app, command).exit_code


def test_violations_are_shrunk(outcomes: dict[str, Any]) -> None:
    assert min(outcomes["shrunk"]) <= 12


@pytest.mark.parametrize("connector", CONNECTORS)
def test_each_drawn_feature_happens(connector: str, outcomes: dict[str, Any]) -> None:
    assert {what for what, count in outcomes["happened"][connector].items() if not count} - RARE == NEVER[connector]


def test_an_engine_is_released_when_its_run_is_over(outcomes: dict[str, Any]) -> None:
    """The runs with v1 alone make more than 200 engines. LMCache's metrics keep at most the last few engines alive."""
    assert outcomes["engines"] < 10


PAIR = ("restarts", "sent_again", "malformed")
OF_RANKS = (
    "failed_on_one_rank",
    *(f"loads_with_{each}" for each in ("more_ranks", "fewer_ranks", "late_rank", "copied_heads")),
)
OF_GROUPS = ("loads_with_one_window", "loads_with_two_windows")
WITH_LMCACHE = ("nixl-multi", "nixl-push-multi", "mooncake-multi")
SIMPLE = ("loads_failed", "aborted_loading", "aborted_storing", "loads_of_groups", "ranks_apart", "inputs")
BOTH = ("loads_offloaded", "passed_over", "loads_failed", "evicted", "preemptions", "full_steps", "inputs")
#: (connector, mode, seeds, option that a schedule must have, counters that are not 0 in schedules with faults)
FUZZED: list[tuple[str, str, Sequence[int], str, tuple[str, ...]]] = [
    *((connector, "check", range(16), "", ()) for connector in ("v1", "mp")),
    ("simple-offload", "check", range(30), "", SIMPLE),
    ("v1", "check", range(250, 350), "simple_offloading", BOTH),
    ("nixl-pull", "fix", range(6, 16), "", (*PAIR, "leases", "aborted_loading")),
    ("nixl-push", "check", range(10), "", (*PAIR, "leases", "at_once", "asked_again")),
    ("mooncake", "check", range(10), "", (*PAIR, "at_once")),
    *((connector, "check", range(10), "", ("loaded_beside",)) for connector in WITH_LMCACHE),
    ("nixl-offload", "fix", range(5, 13), "", ("loads_offloaded",)),
    ("nixl-pull", "check", (2, 5, 11, 12, 20), "peer_ranks", OF_RANKS),
    ("nixl-push", "check", (20, 21, 23, 30, 47), "peer_ranks", OF_RANKS),
    *((connector, "check", range(40), "windows", OF_GROUPS) for connector in WITH_RANKS),
    # the same seed four times, because the file tier's threads must not change what the lookups find
    ("offloading", "fix", (102,) * 4, "", ()),
    # schedules for which the lab once reported a false LAB026, or which send an aborted request again (KVF363)
    ("mooncake", "check", (664, 1255, 1302), "", ()),
]


def fuzzed(connector: str, plain: bool, mode: str, seeds: list[int], only: str) -> list[Any]:
    """Return [violations, counts] of each schedule: a list for all seeds, and a list for the first seeds again."""

    def played(seeds: list[int]) -> list[Any]:
        done = map(late.play, (each for each in run.schedules(seeds) if not only or getattr(each.options, only)))
        return [[[str(found) for found in each.violations], {**each.counts, "steps": each.steps}] for each in done]

    run = late.Run(connector, not (plain and connector == "simple-offload"), plain, mode)
    with run.applied():
        return [played(seeds), played([] if only else seeds[:4])]  # a schedule must play twice in the same way


#: (arguments of `fuzzed`, counters that must not be 0). A plain schedule has no faults, no windows and one rank.
#: Six seeds are enough for plain schedules, because test_healthy.py also plays plain schedules.
CASES = [
    *((connector, False, mode, list(seeds), only, happened) for connector, mode, seeds, only, happened in FUZZED),
    *((connector, True, mode, list(seeds[:6]), "", ()) for connector, mode, seeds, only, _ in FUZZED if not only),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[4]}-{'plain' if case[1] else 'faults'}")
def test_schedules_are_clean_with_the_fixes(case: tuple[Any, ...], once: Once) -> None:
    *arguments, happened = case
    first, again = once(fuzzed, RELEASES / "0.5.6", *arguments)
    assert again == first[: len(again)]
    assert [text for violations, _ in first for text in violations] == []
    counts = sum((Counter(each) for _, each in first), Counter[str]())
    assert [each for each in ("loaded_tokens", "stored_tokens", "preemptions", *happened) if not counts.get(each)] == []


SIMPLE_AND_V1 = {"simple_offloading": True, "offloading": "last"}
REAL_SERVER = {"connector": "mp", "chunk_size": SERVER_CHUNK, "real_server": True}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        *(
            ({**REAL_SERVER, **more}, "the lab plays a real server with mp, ")
            for more in (
                {"connector": "v1"}, {"ranks": 2}, {"windows": (16,)}, {"states": True}, {"offloading": "last"},
                {"chunk_size": 64},
            )
        ),
        *(
            ({**SIMPLE_AND_V1, **more}, r"SimpleCPUOffloadConnector|one rank")
            for more in ({"connector": "mp"}, {"offloading": ""}, {"prefix_caching": False}, {"ranks": 2})
        ),
        ({"connector": "mooncake", "real_transfers": True}, "transfers only with nixl-pull, nixl-push, nixl-multi"),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_the_lab_does_not_play_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Options(**options)


def test_changed_options_are_counted() -> None:
    changed = {"async_scheduling": True, "policy": "priority", "ranks": 2, "windows": (16,)}
    made = Options(connector="mp", num_blocks=9, lmcache={"one": 1}, **changed)
    assert sorted(made.changed) == sorted([*changed, "one"])


ASK = """
from typer.testing import CliRunner
from kvfix_tools.lab import releases
from kvfix_tools.lab.cli import app
releases.find_spec = lambda name: None  # NIXL is not installed
result = []
for arguments in {cases!r}:
    done = CliRunner().invoke(app, arguments)
    result.append([done.exit_code, done.stdout, done.stderr])
"""


def test_vllms_copy_and_later_releases_have_other_arguments() -> None:
    """An error message in options.KNOWN names lines of vLLM and LMCache. Check that the code is on these lines."""
    copied = site_packages() / "vllm/distributed/kv_transfer/kv_connector/v1/lmcache_mp_connector.py"
    theirs = [RELEASES / each / "lmcache/integration/vllm/vllm_multi_process_adapter.py" for each in ("0.4.7", "0.5.6")]
    own, early, late = (file.read_text().splitlines() for file in (copied, *theirs))
    assert (own[119], own[130]) == ("    parallel_strategy = ParallelStrategy(", "        server_url=server_url,")
    assert early[283] == "class ParallelStrategy:"
    assert late[672] == "        server_urls: list[str],"


def test_refusals(fresh: Fresh, tmp_path: Path) -> None:
    good = {"kvfix-schedule": 1, "versions": releases.versions(), "options": {}, "steps": []}
    files: dict[str, tuple[dict[str, Any], str]] = {
        "nixl": ({"options": {"connector": "nixl"}}, "no connector 'nixl'; known: v1, mp, mp-in-tree, offloading"),
        "option": ({"options": {"no_such": 1}}, "not a saved schedule (TypeError: "),
        "ranks": ({"options": {"beside": True, "ranks": 2}}, "a MultiConnector only with one rank"),
        "step": ({"steps": [["fly", 1]]}, "has no step fly"),
        "in-tree": ({"options": {"connector": "mp-in-tree"}}, "where 0.5.0 to 0.5.6 take server_urls (0.5.6:673)"),
        "old": ({"kvfix-schedule": 0}, "the schedule has format 0, but kvfix reads 1"),
        "elsewhere": (
            {"versions": {"vllm": "0.1", "lmcache": "0.1"}},
            "the schedule was saved with vllm 0.1, lmcache 0.1, but vllm",
        ),
    }
    for name, (changed, _) in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**good, **changed}))
    (tmp_path / "odd.json").write_text("{}")
    played = {**{name: case[1] for name, case in files.items()}, "none": "No such file", "odd": "not a saved schedule"}
    early, real = ["--lmcache-path", str(RELEASES / "0.3.10")], ["--transfers", "real"]
    cases = (
        (["fuzz", "--connector", "nixl"], "known: v1, mp, mp-in-tree, offloading"),
        (["fuzz", "--seeds", "many"], "many"),
        (["fuzz", "--connector", "nixl-pull", *real], "not checked: NIXL is not installed: pip install nixl nixl-cu12"),
        (["run", "no-such"], "no scenario no-such. `kvfix lab list` lists the scenarios\n"),
        (["run", "full-hit-asked-twise"], "twise. Did you mean full-hit-asked-twice? `kvfix lab list` lists the"),
        (["run"], "name a scenario, or --all"),
        (["run", "full-hit-asked-twice", "--lmcache-path", "/nowhere"], "holds no lmcache package"),
        *((["play", str(tmp_path / f"{name}.json")], text) for name, text in played.items()),
        (["fuzz", "--connector", "mp", *early], "lab plays mp with lmcache >=0.4.5: earlier releases of LMCache lack"),
    )
    answers = fresh(ASK.format(cases=[arguments for arguments, _ in cases]))
    for (arguments, text), (code, out, err) in zip(cases, answers, strict=True):
        assert (code, out) == (77 if "real" in arguments else 2, ""), (arguments, err)
        assert text in err
        assert "Traceback" not in err
