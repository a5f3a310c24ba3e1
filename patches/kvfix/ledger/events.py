"""What happens to a request's tokens, whoever saw it. Counts are in tokens; None where the source cannot tell.

The names are those of vLLM's connector hooks (vllm/distributed/kv_transfer/kv_connector/v1/base.py).
"""

from __future__ import annotations

from typing import NamedTuple, Union


class Asked(NamedTuple):
    """`get_num_new_matched_tokens` answered.

    total: tokens of the request. computed: those vLLM has, as shown to the connector (whole blocks). hit: tokens that
    the external cache has from the start of the request. promised: the answer; None: not known yet, ask again.
    asynchronous: the load is to run between steps.
    replay: of a hit vLLM takes whole blocks only, and computes up to so many of its last tokens again (prefix replay,
    `prefix_replay_tokens`). divergent: `computed` may be more than all kinds of layers have; where nothing is granted
    vLLM starts with what they all have (`supports_divergent_local_hybrid_hits`).
    """

    request: str
    total: int
    computed: int
    hit: int | None
    promised: int | None
    asynchronous: bool = False
    replay: int = 0
    divergent: bool = False


class Granted(NamedTuple):
    """`update_state_after_alloc`: vLLM has blocks for the request and takes `external` tokens of the promise."""

    request: str
    external: int


class Scheduled(NamedTuple):
    """The request is in a scheduler output: `tokens` are computed on top of `computed` (local and loaded ones).

    capacity: slots of its blocks. first: it was waiting before, new or preempted.
    """

    request: str
    computed: int
    tokens: int
    capacity: int | None = None
    first: bool = False


class LoadDue(NamedTuple):
    """The connector's metadata tell the worker to load tokens [start, end) of the request."""

    request: str
    start: int
    end: int


class Loaded(NamedTuple):
    """The worker has loaded `tokens` tokens up to `end`, of those that were due; fewer than due: a failed load."""

    request: str
    tokens: int
    end: int


class Stored(NamedTuple):
    """The worker has handed tokens [start, end) of the request to the external cache.

    covered: tokens from the start of the request that the cache holds already.
    """

    request: str
    start: int
    end: int
    covered: int = 0


class Preempted(NamedTuple):
    """vLLM has taken the request's blocks; it waits again."""

    request: str


class LoadFailed(NamedTuple):
    """The load came short; vLLM takes the request back to `computed` tokens (None: not told)."""

    request: str
    computed: int | None


class Finished(NamedTuple):
    """The request has ended, or was aborted."""

    request: str
    aborted: bool


class Left(NamedTuple):
    """State of an ended request was found in `where` (a dictionary, a pin, a lock) when it should be gone."""

    request: str
    where: str


class Stuck(NamedTuple):
    """The request waits for a load, and no load of it is under way."""

    request: str
    waited: int


class TimedOut(NamedTuple):
    """A lookup for the request was waited for, and not answered: `waited` seconds, until `at` on any steady clock."""

    request: str
    waited: float
    at: float

    def is_at_once_after(self, other: TimedOut) -> bool:
        """Whether less time was left between the two than was waited."""
        return self.at - other.at < 2 * self.waited


class Raised(NamedTuple):
    """An exception left a hook, or the scheduler."""

    request: str
    where: str
    error: str


class RankDiffers(NamedTuple):
    """Between loads that the scheduler and this rank have both on record, one of [start, end) is on record once only.

    told: by the scheduler, and the rank has not begun it; else it is the other way round.
    """

    request: str
    rank: int
    start: int
    end: int
    told: bool


Event = Union[  # noqa: UP007  also read at run time on Python 3.10
    Asked,
    Granted,
    Scheduled,
    LoadDue,
    Loaded,
    Stored,
    Preempted,
    LoadFailed,
    Finished,
    Left,
    Stuck,
    TimedOut,
    Raised,
    RankDiffers,
]
