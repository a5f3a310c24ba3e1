"""A finding about chunks that are evicted before they are needed again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding, note
from kvfix_tools.diagnose.findings.lookups_seen import ENOUGH, lookups_of

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: Default of `max_local_cpu_size` in GB, in every release.
DEFAULT = 5.0
#: `size: 1.5300 gb` of `Stored ...`, 0.3.9 to 0.5.6.
_SIZE = re.compile(rb"size: (\d{1,6}(?:\.\d{1,6})?) [gG][bB]")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class _StoredGigabytes(dict[str, float]):
    """{process: gigabytes that it has stored}"""


@note("stored")
def _note_size(log: Diagnosis, line: LogLine) -> None:
    found = _SIZE.search(line.body)
    if found is not None:
        sizes = log.state(_StoredGigabytes)
        if line.process in sizes or len(sizes) < 64:
            sizes[line.process] = sizes.get(line.process, 0.0) + float(found[1])


@finding("KVD644", "stored-more-than-fits", Severity.SLOW, on=[""])
def stored_more_than_fits(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """No lookup has a hit: more KV is stored than the CPU cache holds, so chunks are evicted before they are needed.

    Cause: LMCache evicts the oldest chunks first. If the same prompts repeat in a round that is larger than the cache,
    each chunk is evicted before its prompt repeats.

    Setting: `max_local_cpu_size` (LMCACHE_MAX_LOCAL_CPU_SIZE, GB for each rank) larger than the KV of one round, which
    the sentence shows. Or set `local_disk` and `max_local_disk_size` of this size. For a test: use fewer prompts.

    Normal: prompts that never repeat.
    """
    kept, sizes = lookups_of(log), log.state(_StoredGigabytes)
    if not sizes or kept.number < ENOUGH or log.hit or kept.settings.get("remote_url", "None") != "None":
        return None
    named = _NUMBER.match(kept.settings.get("max_local_cpu_size", ""))
    room, most = float(named[0]) if named is not None else DEFAULT, max(sizes.values())
    if most <= room or log.findings:
        return None
    of = "max_local_cpu_size is" if named is not None else "the default of max_local_cpu_size is"
    return Answer(
        f"{kept.number} lookups, 0 hits; a worker has stored {most:.3g} GB, and {of} {room:g} GB",
        request="",
        verdict="unknown",
    )
