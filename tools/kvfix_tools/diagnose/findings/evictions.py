"""Nothing is found again because it was evicted: what was stored against the room there is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding, note
from kvfix_tools.diagnose.findings.lookups_seen import ENOUGH, lookups_of

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: `max_local_cpu_size` in GB where nothing is configured, in every release.
DEFAULT = 5.0
#: `size: 1.5300 gb` of `Stored ...`, 0.3.9 to 0.5.6.
_SIZE = re.compile(rb"size: (\d{1,6}(?:\.\d{1,6})?) [gG][bB]")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class _StoredGigabytes(dict[str, float]):
    """{process: what it has stored}"""


@note("stored")
def _note_size(log: Diagnosis, line: LogLine) -> None:
    found = _SIZE.search(line.body)
    if found is not None:
        sizes = log.state(_StoredGigabytes)
        if line.process in sizes or len(sizes) < 64:
            sizes[line.process] = sizes.get(line.process, 0.0) + float(found[1])


@finding("KVD644", "stored-more-than-fits", Severity.SLOW, on=[""])
def stored_more_than_fits(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """More is stored than the CPU buffer holds, and nothing is found again.

    Cause: the oldest chunks are evicted first. Prompts that come round in a turn longer than the buffer are gone each
    time before they come again: then there is not one hit, whatever else is right.

    Setting: `max_local_cpu_size` (LMCACHE_MAX_LOCAL_CPU_SIZE, GB for each rank) above what one round stores, as the
    sentence has it; or a `local_disk` with `max_local_disk_size` of that; or, for a test, fewer prompts in a round.

    Normal: prompts that never come again.
    """
    kept, sizes = lookups_of(log), log.state(_StoredGigabytes)
    if not sizes or kept.number < ENOUGH or log.hit or kept.settings.get("remote_url", "None") != "None":
        return None
    named = _NUMBER.match(kept.settings.get("max_local_cpu_size", ""))
    room, most = float(named[0]) if named is not None else DEFAULT, max(sizes.values())
    if most <= room or log.findings:
        return None
    of = "max_local_cpu_size" if named is not None else "max_local_cpu_size, if it is the default,"
    return Answer(
        f"{kept.number} lookups, 0 hits; a worker has stored {most:.3g} GB, {of} is {room:g}",
        request="",
        verdict="unknown",
    )
