"""Find out why a running engine makes no progress. The functions are pure.

A `Look` holds the states of all processes of an engine (`kvfix.engine_state`), read at slightly different times. A
verdict needs two looks or more, because a worker's report may still be on its way to the scheduler at the first look.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvfix.ledger import liveness
from kvfix.ledger.liveness import LOAD, LOOKUP, Engine

#: A connector hook counts as stuck after this number of seconds.
HOOK = 3.0
#: If no request makes progress, a transfer or lookup counts as unanswered after LATE seconds, otherwise after LATER.
LATE, LATER = 5.0, 30.0
#: These fields of a request's row do not change while the request waits.
_OF_A_WAIT = ("computed", "total", "preemptions")
#: The stack frame in which LMCache waits for its server's response (lmcache/v1/multiprocess/futures.py 0.5.6:86).
_OF_SERVER = "result (multiprocess/futures.py:"


class Look(NamedTuple):
    """The states of all processes of an engine, read at almost the same time."""

    at: float  # seconds of a monotonic clock
    #: For a process that kvfix could not read, the only keys are pid, name, silent (the reason), stack and hook.
    processes: list[dict[str, Any]]


class Verdict(NamedTuple):
    """A cause of the standstill."""

    code: str  # of a finding (KVD) or a rule (KVR)
    name: str
    request: str
    message: str
    now: str  # what the user should do
    waiting: str  # whether it helps to wait


def verdicts(looks: Sequence[Look]) -> list[Verdict]:
    """Return the verdicts in order, the worst first. A request has at most one verdict."""
    looks = of_these_hooks(looks)
    if len(looks) < 2:
        return []
    found: list[Verdict] = []
    for rule in _RULES:
        for each in rule(looks):
            if each.request not in {other.request for other in found if other.request}:
                found.append(each)
    return found


def engines(looks: Sequence[Look]) -> Iterator[tuple[Engine, Engine, float]]:
    """Yield (engine at the first look, the same engine at the last look, seconds between the two looks)."""
    before = {engine.process["pid"]: engine for engine in liveness.engines(looks[0].processes)}
    for engine in liveness.engines(looks[-1].processes):
        if engine.process["pid"] in before:
            yield before[engine.process["pid"]], engine, looks[-1].at - looks[0].at


def rows(before: Engine, after: Engine, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the last row of each request that waits for `kind` at both looks, if no count in _OF_A_WAIT has changed."""
    first = {row["id"]: row for row, waits_for in liveness.waits(before) if waits_for == kind}
    for row, waits_for in liveness.waits(after):
        old = first.get(row["id"])
        if old is not None and waits_for == kind and all(old[key] == row[key] for key in _OF_A_WAIT):
            yield row


def steps_between(before: Engine, after: Engine) -> int | None:
    """Return how many engine steps began between the looks, or None for a release of vLLM that does not count steps."""
    first, last = before.scheduler["steps"], after.scheduler["steps"]
    return None if first is None or last is None else int(last - first)


def is_current(before: Engine, after: Engine, span: float) -> bool:
    """Return True if reports had time to arrive after the first look: 3 steps, or 10 s if vLLM does not count steps."""
    steps = steps_between(before, after)
    return span >= 2 * LATE if steps is None else steps > 2


def moved(looks: Sequence[Look]) -> bool:
    """Return True if any request has made progress or ended between the first and the last look."""
    for before, after, _ in engines(looks):
        last = {row["id"]: _progress(row) for row in after.requests}
        if any(last.get(row["id"]) != _progress(row) for row in before.requests):
            return True
    return False


def _progress(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*(row[key] for key in _OF_A_WAIT), row["status"], row["queue"], row["report"])


def in_hooks(looks: Sequence[Look]) -> Iterator[tuple[dict[str, Any], Engine | None]]:
    """Yield (process, engine) for each process in the same hook at every look. `engine` is None for a worker."""
    by_pid = {engine.process["pid"]: engine for engine in liveness.engines(looks[-1].processes)}
    for process in looks[-1].processes:
        pid, hook = process["pid"], process.get("hook")
        same = [each for look in looks for each in look.processes if each["pid"] == pid and each.get("hook") == hook]
        if hook and len(same) == len(looks):
            yield process, by_pid.get(pid)


def of_these_hooks(looks: Sequence[Look]) -> Sequence[Look]:
    """Drop the looks that were taken before a process entered its current hook.

    A process in a hook may block all other processes. If only one look would remain, return all looks.
    """
    hooks = {each["pid"]: each["hook"] for each in looks[-1].processes if each.get("hook")}
    first = len(looks) - 1
    while first and hooks.items() <= {each["pid"]: each.get("hook") for each in looks[first - 1].processes}.items():
        first -= 1
    return looks[first:] if first < len(looks) - 1 else looks


def stands(looks: Sequence[Look], process: dict[str, Any]) -> bool:
    """Return True if the process has made no progress during looks that span at least HOOK seconds.

    A scheduler makes progress if it begins more than one step in 2 s. A worker makes progress if a request moves.
    """
    span = looks[-1].at - looks[0].at
    steps = {after.process["pid"]: steps_between(before, after) for before, after, _ in engines(looks)}
    count = steps.get(process["pid"])
    return span >= HOOK and not (moved(looks) if count is None else count > span / 2)


def _stands_in_hook(looks: Sequence[Look]) -> Iterator[Verdict]:
    """Find processes that are in the same hook at every look while the engine makes no progress."""
    for process, engine in in_hooks(looks):
        hook = process["hook"]
        if not stands(looks, process) or (engine is not None and _blocks_on_lookups(engine, hook)):
            continue
        name, inside = _name(process), f"in {hook} for at least {looks[-1].at - looks[0].at:.0f} s"
        at = f", at {process['stack'][0]}" if process.get("stack") else ""
        rest = "; the scheduler waits for this process" if "rank" in name or "Worker" in name else ""
        if any(frame.startswith(_OF_SERVER) for frame in process.get("stack") or ()):
            yield Verdict(
                "KVD204", "server-does-not-answer", "",
                f"the LMCache server does not answer: {name} has waited {inside}{rest}",
                "check that the LMCache server runs, and read its log",
                "waiting helps if the server answers",
            )  # fmt: skip
            continue
        yield Verdict(
            "KVD213", "stands-in-connector", "",
            f"{name} has been {inside}{at}{rest}",
            "run `kvfix dump PID` to keep all stacks for a report, then restart the engine",
            "waiting helps only if the server, worker or storage behind this call answers",
        )  # fmt: skip


def _name(process: dict[str, Any]) -> str:
    ranks = [each["rank"] for each in process.get("connectors") or () if each["role"] == "WORKER"]
    if process.get("scheduler"):
        return "the scheduler"
    name = process.get("name") or process.get("process") or "process"
    return f"rank {ranks[0]}" if ranks else f"{name} ({process['pid']})"


def _lookup_client(engine: Engine) -> dict[str, Any] | None:
    """Return the row of the LMCache connector whose lookups block the scheduler until all ranks answer, or None."""
    connector = next((each for each in engine.connectors if "asynchronous" in each), None)
    return None if connector is None or connector["asynchronous"] else connector


def _blocks_on_lookups(engine: Engine, hook: str) -> bool:
    return hook == "get_num_new_matched_tokens" and _lookup_client(engine) is not None


def _ended_threads(engine: Engine) -> set[int]:
    return {each["rank"] for _, each in engine.workers if (each.get("threads") or {}).get("lookup_server") is False}


def _lookup_blocks(looks: Sequence[Look]) -> Iterator[Verdict]:
    """Find engines whose scheduler is stuck in a lookup, and engines with a rank whose lookup thread has ended."""
    hooks = {process["pid"]: process for process, _ in in_hooks(looks) if stands(looks, process)}
    for before, after, _ in engines(looks):
        connector = _lookup_client(after)
        if connector is None:
            continue
        process = hooks.get(after.process["pid"])
        ended = _ended_threads(before) & _ended_threads(after)
        if not (process and _blocks_on_lookups(after, process["hook"])) and not (ended and after.requests):
            continue
        why = [f"rank {rank} does not answer: its thread for lookups has ended" for rank in sorted(ended)]
        for _, each in after.workers:
            if each.get("healthy") is False:
                reason = f" ({each['why']})" if each.get("why") else ""
                why.append(f"rank {each['rank']} does not answer: its LMCache did not start{reason}")
        yield Verdict(
            "KVD203", "lookups-not-answered", "",
            f"the scheduler waits {connector['lookup_timeout']:g} s for each lookup; "
            + ("; ".join(why) or "a rank does not answer"),
            "apply KVF015, which sends lookups less and less often, or restart with a smaller `lookup_timeout_ms`",
            "waiting does not help: every lookup waits for its timeout",
        )  # fmt: skip


def _load_without_worker(looks: Sequence[Look]) -> Iterator[Verdict]:
    for before, after, span in engines(looks):
        if not (before.sees_transfers and after.sees_transfers) or not is_current(before, after, span):
            continue
        for row in rows(before, after, LOAD):
            name = row["id"]
            if before.ranks_with(name, *liveness.KINDS) or after.ranks_with(name, *liveness.KINDS):
                continue
            left = after.scheduler["ranks_left"].get(name)
            ranks = f"; {left} of {after.ranks} ranks have not reported it" if left else ""
            yield Verdict(
                "KVD208", "waits-for-load", name,
                f"{name} waits for a load that no worker has{ranks}; it keeps {row['blocks']} blocks",
                f"abort {name}, so that its client gets an answer. vLLM keeps the request's blocks until a restart, "
                "because no rank reports the load",
                f"waiting does not help: no load of {name} is in flight",
            )  # fmt: skip


def _load_not_answered(looks: Sequence[Look]) -> Iterator[Verdict]:
    any_moved = moved(looks)
    for before, after, span in engines(looks):
        for row in rows(before, after, LOAD):
            name, waits = row["id"], max(span, row["since"] or 0)
            ranks = after.ranks_with(name, "loads")
            if not ranks or waits < (LATER if any_moved else LATE) or after.ranks_with(name, "answered"):
                continue
            timeout = max((each.get("lookup_timeout") or 0 for _, each in after.workers), default=0)
            given_up = f"; LMCache stops waiting for the server after {timeout:g} s" if timeout else ""
            yield Verdict(
                "KVD204", "server-does-not-answer", name,
                f"{name} has waited {waits:.0f} s for its load, which {liveness.ranks_text(ranks)} has begun and the "
                "LMCache server has not answered",
                "check that the LMCache server runs, and read its log; the connector reconnects to a restarted server",
                f"waiting helps if the server answers{given_up}",
            )  # fmt: skip


def _lookup_not_answered(looks: Sequence[Look]) -> Iterator[Verdict]:
    """Find lookups in flight at both looks. Find none while a process is in a hook, because hooks delay all lookups."""
    if any(in_hooks(looks)):
        return
    any_moved = moved(looks)
    for before, after, span in engines(looks):
        in_process = any("asynchronous" in each for each in after.connectors)
        timeout = max((each.get("lookup_timeout") or 0 for each in after.connectors), default=0)
        for row in rows(before, after, LOOKUP):
            waits = max(span, row["since"] or 0)
            if waits < (LATER if any_moved else LATE):
                continue
            who = "no worker answers" if in_process else "the LMCache server does not answer"
            helps = f"waiting helps: the lookup times out after {timeout:g} s, and vLLM computes the request"
            helps += "; without KVF011 EngineCore may crash then" if in_process else ""
            code, name = ("KVD211", "lookups-given-up") if in_process else ("KVD204", "server-does-not-answer")
            yield Verdict(
                code, name, row["id"],
                f"{row['id']} has waited {waits:.0f} s for its lookup, which {who}",
                "read LMCache's log " + ("of the workers" if in_process else "of the server, and check that it runs"),
                helps if timeout > waits else "waiting does not help",
            )  # fmt: skip


def _cannot_move(looks: Sequence[Look]) -> Iterator[Verdict]:
    """Find engines in which no request can move at either look, and no request has moved between the looks.

    Give no verdict inside a step, because the queues are then incomplete. Give no verdict while a process is in a hook,
    because the hook may be the cause.
    """
    if moved(looks) or any(in_hooks(looks)):
        return
    for before, after, _ in engines(looks):
        if before.process["in_step"] or after.process["in_step"] or after.scheduler["paused"]:
            continue
        first, last = liveness.can_move(liveness.state(before)), liveness.can_move(liveness.state(after))
        if (first.verdict, first.request) != ("violated", last.request) or last.verdict != "violated":
            continue
        held = {row["id"]: row["blocks"] for row in liveness.waiting(after)}
        who = max(held, key=lambda name: (held[name], name == last.request))
        yield Verdict(
            "KVD202", "nothing-moves", last.request, last.message,
            f"abort {who}: its {held[who]} blocks become free" if held[who] else f"abort {last.request}",
            "waiting does not help: nothing runs, and nothing is in flight",
        )  # fmt: skip


def _kept_after_end(looks: Sequence[Look]) -> Iterator[Verdict]:
    for before, after, span in engines(looks):
        if not (before.sees_transfers and after.sees_transfers) or not is_current(before, after, span):
            continue
        ended = {row["id"] for row in before.requests if row["queue"] == "ended"}
        for row in after.requests:
            name, kinds = row["id"], ("stores", *liveness.KINDS)
            is_kept = row["queue"] == "ended" and name in ended and row["blocks"]
            if is_kept and not (before.ranks_with(name, *kinds) or after.ranks_with(name, *kinds)):
                yield Verdict(
                    "KVR009", "state-left-behind", name,
                    f"{name} has ended, and its {row['blocks']} blocks wait for a transfer that no worker has",
                    "its blocks are lost until a restart",
                    f"waiting does not help: no transfer of {name} is in flight",
                )  # fmt: skip


def _without_lmcache(looks: Sequence[Look]) -> Iterator[Verdict]:
    """Find connectors that run without LMCache at every look, or whose LMCache server does not answer at any look."""
    sick = [_sick(look) for look in looks]
    return (verdict for key, verdict in sick[-1].items() if all(key in each for each in sick))


def _sick(look: Look) -> dict[tuple[Any, ...], Verdict]:
    """Return the look's verdicts. Keys: (pid, rank) if LMCache is missing, (pid, "server") if the server is silent."""
    found: dict[tuple[Any, ...], Verdict] = {}
    for process in look.processes:
        for each in process.get("connectors") or ():
            if each.get("healthy") is not False:
                continue
            rank = f"rank {each['rank']}" if each["role"] == "WORKER" else "the scheduler"
            why = f" ({each['why']})" if each.get("why") else ""
            if "threads" in each or "asynchronous" in each:
                found[process["pid"], each["rank"]] = Verdict(
                    "KVD207", "worker-without-lmcache", "",
                    f"{rank} runs without LMCache, which did not start{why}",
                    "read the log of LMCache's start",
                    "vLLM computes all tokens; waiting does not help",
                )  # fmt: skip
            else:
                found[process["pid"], "server"] = Verdict(
                    "KVD204", "server-does-not-answer", "",
                    f"the LMCache server does not answer the pings of {rank}",
                    "start the LMCache server again",
                    "vLLM computes all tokens until the server answers",
                )  # fmt: skip
    return found


#: The rules, with the worst verdicts first.
_RULES: tuple[Callable[[Sequence[Look]], Iterator[Verdict]], ...] = (
    _lookup_blocks, _stands_in_hook, _load_without_worker, _load_not_answered, _lookup_not_answered, _cannot_move,
    _kept_after_end, _without_lmcache,
)  # fmt: skip
