"""Lookups at the LMCache server that find nothing, in a log of a few lines as people paste it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding, note
from kvfix_tools.diagnose.findings.memory import PASTE

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine


@note("mp_prefetched")
def _note_lookup(log: Diagnosis, line: LogLine) -> None:
    """{chunks that were looked up: lookups that found none of them}; under 0: lookups with a hit."""
    missed: Counter[int] = log.memory.setdefault("server_lookups", Counter())
    if len(missed) < PASTE:
        missed[0 if line.fields["hit"] else line.fields["wanted"]] += 1


@finding("KVD499", "server-finds-nothing", Severity.RISK, on=[""])
def server_finds_nothing(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """The server stores prompts and finds nothing of prompts of the same length.

    Cause: in this order. They are different prompts (a time, an id or a session at their start is enough), or the first
    ones after a start. Else keys differ: another served model name, tensor parallel size or cache salt; two servers, of
    which one takes the stores; chunks that are evicted before they are asked for (--l1-size-gb).

    Setting: the same prompt of more than --chunk-size tokens twice, to one engine, with
    `--no-enable-prefix-caching`; then `curl http://SERVER:8080/status` shows models, workers and the use of L1.

    Good: a start of prompts that stays the same; an L1 that holds what comes again.

    Normal: the first request with each prompt.
    """
    missed: Counter[int] = log.memory.get("server_lookups", Counter())
    chunks, times = max(missed.items(), key=lambda each: each[1], default=(0, 0))
    if missed[0] or times < 2 or not log.counts["mp_stored"] or log.counts.total() > PASTE or log.findings:
        return None
    return Answer(f"{missed.total()} lookups, 0 hits; {times} times {chunks} chunks", request="", verdict="unknown")
