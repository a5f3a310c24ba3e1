"""Events of a request's tokens, from any source. Counts are in tokens; None: the source does not know.

The names are those of vLLM's connector hooks (vllm/distributed/kv_transfer/kv_connector/v1/base.py).
"""

from __future__ import annotations

from typing import NamedTuple, Union


def balance(hit: int, computed: int, total: int) -> int:
    """Tokens to load: the hit minus the computed tokens, minus the last token if the whole request is hit.

    vLLM recomputes the last token for its logits (LMCache issue 2158). 0 or less: there is nothing to load.
    """
    return hit - computed - (hit == total)


class Asked(NamedTuple):
    """`get_num_new_matched_tokens` returned.

    total: tokens of the request. computed: tokens that vLLM has, as passed to the connector (whole blocks). hit: tokens
    that the external cache has from the start of the request. promised: the answer; None: not known yet, ask again.
    asynchronous: the load runs between steps.
    replay: vLLM takes only whole blocks of a hit and recomputes up to so many of its last tokens (prefix replay,
    `prefix_replay_tokens`). divergent: `computed` may be more than all kinds of layers have. If nothing is granted,
    vLLM then starts with what they all have (`supports_divergent_local_hybrid_hits`).
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

    capacity: slots of its blocks. first: it waited before, as a new or a preempted request.
    """

    request: str
    computed: int
    tokens: int
    capacity: int | None = None
    first: bool = False


class LoadDue(NamedTuple):
    """The connector's metadata have a load of tokens [start, end) of the request for the worker.

    block: tokens of a block, if the metadata name blocks alone: the last of them may not be full. 0: they name tokens.
    relative: they count from the end of the computed tokens, as the metadata do not say where that is.
    """

    request: str
    start: int
    end: int
    block: int = 0
    relative: bool = False


class Loaded(NamedTuple):
    """The worker has loaded `tokens` tokens up to `end`. Fewer than the LoadDue event: a failed load."""

    request: str
    tokens: int
    end: int


class Stored(NamedTuple):
    """The worker has stored tokens [start, end) of the request in the external cache.

    covered: tokens from the start of the request that the cache has already.
    """

    request: str
    start: int
    end: int
    covered: int = 0


class BlocksLost(NamedTuple):
    """A store of tokens [start, end) of KV group `group` reads blocks that vLLM does not keep for the request.

    blocks: what they are: "null blocks", "blocks freed before the step", or "blocks freed after it and used again".
    """

    request: str
    group: int
    start: int
    end: int
    blocks: str


class Preempted(NamedTuple):
    """vLLM has freed the request's blocks. The request waits again."""

    request: str


class LoadFailed(NamedTuple):
    """The load failed, all or in part. vLLM rolls the request back to `computed` tokens (None: not known)."""

    request: str
    computed: int | None


class Finished(NamedTuple):
    """The request has ended, or was aborted."""

    request: str
    aborted: bool


class Left(NamedTuple):
    """State of an ended request leaked in `where` (a dictionary, a pin, a lock)."""

    request: str
    where: str


class Stuck(NamedTuple):
    """The request waits for a load, and none is in flight."""

    request: str
    waited: int


class TimedOut(NamedTuple):
    """A lookup of the request timed out after `waited` seconds, at `at` seconds of any monotonic clock."""

    request: str
    waited: float
    at: float

    def is_at_once_after(self, other: TimedOut) -> bool:
        """Whether the pause between the two lookups was shorter than this lookup's wait."""
        return self.at - other.at < 2 * self.waited


class Raised(NamedTuple):
    """A hook or the scheduler raised an exception."""

    request: str
    where: str
    error: str


class RankDiffers(NamedTuple):
    """A load of [start, end) is in one record only, the scheduler's or the rank's, between loads that are in both.

    told: True: in the scheduler's metadata, and the rank has not started it. False: the other way round.
    """

    request: str
    rank: int
    start: int
    end: int
    told: bool


class Leased(NamedTuple):
    """The request has ended, and its blocks are kept for a peer: until a notice, or for `seconds` (None: not known).

    name: by which the peer knows it, if not by `request`.
    """

    request: str
    seconds: float | None
    name: str = ""


class LeaseExtended(NamedTuple):
    """The peer renews the lease for the first time: the blocks are kept for `seconds` from now (None: not known)."""

    request: str
    seconds: float | None


class LeaseRead(NamedTuple):
    """Request `reader` of the peer has loaded the blocks that are kept of `request`, and takes them for right.

    pushed: as in ReadsFrom.
    """

    request: str
    reader: str
    pushed: bool = False


class LeaseEnded(NamedTuple):
    """The blocks are reported as sent, and free. expired: by time; False: after a notice; None: not known.

    renewed: how often the peer has renewed the lease.
    """

    request: str
    expired: bool | None
    renewed: int = 0


class ReadsFrom(NamedTuple):
    """The request names blocks that another engine, `engine`, keeps of its request `peer`: it is to read them, and to
    give them back. Both names are those of the request's `kv_transfer_params`.

    pushed: that engine writes them, knows itself when it has, and hears nothing of a request that ends before.
    """

    request: str
    engine: str
    peer: str
    pushed: bool = False


class NotReturned(NamedTuple):
    """Request `reader` of the peer is done with the kept blocks, and no notice of it has come.

    loaded: it has loaded them; False: it has ended without. expired: their lease has ended by its time; False: they are
    still kept. Only the records of both engines show it (peers.py).
    """

    request: str
    reader: str
    loaded: bool
    expired: bool


class WriteBegun(NamedTuple):
    """The worker begins to write the kept blocks of the request into those of request `reader` of its peer."""

    request: str
    reader: str


class WriteEnded(NamedTuple):
    """What it writes of the request is done, or has failed: nothing reads its blocks any more."""

    request: str


class Written(NamedTuple):
    """The peer says that it has written into the blocks of the request. awaited: the request waits for that."""

    request: str
    awaited: bool


Event = Union[  # noqa: UP007  also read at run time on Python 3.10
    Asked,
    Granted,
    Scheduled,
    LoadDue,
    Loaded,
    Stored,
    BlocksLost,
    Preempted,
    LoadFailed,
    Finished,
    Left,
    Stuck,
    TimedOut,
    Raised,
    RankDiffers,
    Leased,
    LeaseExtended,
    LeaseRead,
    LeaseEnded,
    WriteBegun,
    WriteEnded,
    Written,
    ReadsFrom,
    NotReturned,
]
