"""Count each fix's actions and errors, and the violations of rules. Log the first action of each fix.

A fix acts if it changes a function's return value or arguments, or skips a call. `kvfix.wrapping` notices these
actions. A fix that changes an object in place must report the change with `note`.

If prometheus_client is in use, vLLM's /metrics also shows kvfix's counts. EngineCore and its workers export
the counts in prometheus_client's multi-process mode, like vLLM (v1/metrics/prometheus.py, PROMETHEUS_MULTIPROC_DIR).
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvfix import engine_log
from kvfix.session import session

_PLAIN = (int, bool, str, float, type(None))


@dataclass(slots=True)
class Tally:
    """Counts of all wrappers with the same key, such as KVF001. acted: actions. faults: errors. first: first action."""

    key: str
    acted: int = 0
    faults: int = 0
    first: str = ""


#: While kvfix wraps a function, `composing` is the tally of the new wrapper. `session.lock` protects `composing`.
composing = NONE = Tally("")


def of(key: str) -> Tally:
    return session.tallies.setdefault(key, Tally(key))


def counts(key: str) -> dict[str, Any]:
    tally = session.tallies.get(key) or Tally(key)
    return {"acted": tally.acted, "faults": tally.faults, "first": tally.first}


def note(module_name: str, what: str = "") -> None:
    """Count that a fix has changed an object in place, as in `note(__name__, "request r7: 16 tokens not stored")`."""
    acted(of(module_name.rpartition(".")[2].partition("_")[0].upper()), what=what)


def acted(tally: Tally, function: Callable[..., Any] | None = None, args: tuple[Any, ...] = (), what: str = "") -> None:
    try:
        tally.acted += 1
        if tally.key.startswith("KVF"):
            if tally.acted == 1:
                tally.first = _text(function, args, what)
                engine_log.info(f"{tally.key} acted: {tally.first}")
            _count("kvfix_fix_acted", "Answers, arguments, calls and objects that a fix changed.", code=tally.key)
    except Exception as error:  # noqa: BLE001
        engine_log.fault("kvfix.metrics", error)


def changed(tally: Tally, function: Callable[..., Any], args: tuple[Any, ...], answer: Any, now: Any) -> None:
    """Count that the fix has changed the return value from `answer` to `now`, unless both are equal plain values."""
    if type(answer) is not type(now) or type(answer) not in _PLAIN or answer != now:
        what = "" if tally.acted else f"answered {_short(answer)}, corrected to {_short(now)}"
        acted(tally, function, args, what)


def count_fault(tally: Tally) -> None:
    tally.faults += 1
    if tally.key.startswith("KVF"):
        _count("kvfix_faults", "Errors in the code of a fix of kvfix.", code=tally.key)


def _text(function: Callable[..., Any] | None, args: tuple[Any, ...], what: str) -> str:
    name = getattr(function, "__qualname__", "")
    ids = (getattr(each, "request_id", None) or getattr(each, "req_id", None) for each in args[1:])
    request = next((each for each in ids if each and isinstance(each, str)), "")
    parts = [name, what or ("" if name else "an object was corrected in place")]
    return ": ".join(part for part in parts if part) + (f" (request {request[:80]!r})" if request else "")


def _short(value: Any) -> str:
    """Return numbers, None and short tuples as text. Any other value may be user data, so return only its type."""
    if isinstance(value, tuple) and len(value) < 4:
        return f"({', '.join(map(_short, value))})"
    return repr(value) if type(value) in (int, bool, float, type(None)) else f"a {type(value).__name__}"


def violated(rule: str) -> None:
    _count("kvfix_violations", "Violated invariants of the KV-cache accounting.", rule=rule)


def audited(chunks: int) -> None:
    _count("kvfix_audited_chunks", "Cached chunks compared with computed KV.", chunks)


def _count(name: str, text: str, by: int = 1, **label: str) -> None:
    try:
        counter = _metric("Counter", name, text, *label)
        if counter is not None:
            (counter.labels(**label) if label else counter).inc(by)
    except Exception as error:  # noqa: BLE001
        _give_up(error)


def settled() -> None:
    """Set the metric kvfix_fixes to 1 for each fix, with the state of the fix in this process as label `verdict`."""
    try:
        from kvfix import catalogue

        more = {"multiprocess_mode": "max"}
        gauge = _metric("Gauge", "kvfix_fixes", "Fixes of kvfix, by their state.", "code", "verdict", **more)
        for fix in catalogue.fixes() if gauge is not None else ():
            for target in fix.targets:
                if target in session.outcomes:
                    gauge.labels(code=fix.code, verdict=session.outcomes[target].state).set(1)
    except Exception as error:  # noqa: BLE001
        _give_up(error)


def _metric(kind: str, name: str, text: str, *labels: str, **more: str) -> Any:
    """Return the metric of this name, or None if prometheus_client is not imported or has failed."""
    client: Any = sys.modules.get("prometheus_client")
    if session.metrics is None:
        return None
    if name not in session.metrics and client is not None:
        session.metrics[name] = getattr(client, kind)(name, text, labels, **more)
    return session.metrics.get(name)


def _give_up(error: Exception) -> None:
    """Log the error, and stop using prometheus_client, because the next call would fail too."""
    session.metrics = None
    engine_log.fault("kvfix.metrics", error)
