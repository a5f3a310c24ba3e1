"""The events of the ledger. Counts are in tokens. A count is None if the source of the event does not know it."""

from typing import NamedTuple, Protocol


def balance(hit: int, computed: int, total: int) -> int:
    """Return the number of tokens to load: hit - computed, and one less if the hit covers the whole request.

    vLLM recomputes the last token for its logits (LMCache issue 2158). If the result is below 1, do not load.
    """
    return hit - computed - (hit == total)


class Event(Protocol):
    """An event of this module or of kvfix_tools."""

    @property
    def request(self) -> str: ...

    def text(self) -> str:
        """Return one line with the arithmetic of the event, without the request id."""


class Asked(NamedTuple):
    """`get_num_new_matched_tokens` returned.

    - total: tokens of the request
    - computed: tokens that vLLM has, as passed to the connector (whole blocks)
    - hit: tokens that the external cache has from the start of the request
    - promised: the tokens in the answer; None: the connector does not know yet, and vLLM will ask again
    - asynchronous: the load runs between steps
    - replay: vLLM takes only whole blocks of a hit and recomputes up to `replay` tokens (`prefix_replay_tokens`)
    - divergent: some KV groups may have fewer than `computed` tokens. If vLLM then takes 0 promised tokens, it keeps
      only the tokens that all KV groups have (`supports_divergent_local_hybrid_hits`).
    """

    request: str
    total: int
    computed: int
    hit: int | None
    promised: int | None
    asynchronous: bool = False
    replay: int = 0
    divergent: bool = False

    def text(self) -> str:
        if self.promised is None:
            return f"lookup at {self.computed} computed tokens: no answer yet"
        answer = f"lookup at {self.computed} computed tokens promises {self.promised}"
        if self.hit is None:
            return answer
        last = " - 1" if self.hit == self.total else ""
        due = balance(self.hit, self.computed, self.total)
        arithmetic = f"hit {self.hit} - computed {self.computed}{last} = {due}"
        if self.promised != max(0, due):
            return f"{answer}, but {arithmetic}: {max(0, due)} is due"
        return f"{answer}: {arithmetic}" + (", nothing to load" if due < 0 else "")


class Granted(NamedTuple):
    """vLLM called `update_state_after_alloc`. It has allocated blocks and takes `external` of the promised tokens."""

    request: str
    external: int

    def text(self) -> str:
        return f"vLLM allocates blocks and grants {self.external} external tokens"


class Scheduled(NamedTuple):
    """A step computes the next `tokens` tokens of the request. vLLM has computed or loaded `computed` tokens before.

    capacity: token slots in the request's blocks. first: True if this step admits a new or preempted request.
    """

    request: str
    computed: int
    tokens: int
    capacity: int | None = None
    first: bool = False

    def text(self) -> str:
        start = "admitted" if self.first else "continues"
        return f"{start} at {self.computed} computed tokens, {self.tokens} more are computed"


class LoadDue(NamedTuple):
    """The connector's metadata tell the worker to load tokens [start, end) of the request.

    block: tokens per block if the metadata list blocks, the last of which may be partly filled; 0 if they list tokens.
    relative: `start` and `end` count from the end of the computed tokens, which the metadata do not contain.
    """

    request: str
    start: int
    end: int
    block: int = 0
    relative: bool = False

    def text(self) -> str:
        return f"tokens {self.start} to {self.end} are to be loaded"


class Loaded(NamedTuple):
    """The worker has loaded `tokens` tokens up to `end`. If LoadDue has more tokens, the load has failed."""

    request: str
    tokens: int
    end: int

    def text(self) -> str:
        return f"{self.tokens} tokens loaded, up to {self.end}"


class Stored(NamedTuple):
    """The worker has stored tokens [start, end) of the request in the external cache.

    covered: tokens from the start of the request that are already cached.
    """

    request: str
    start: int
    end: int
    covered: int = 0

    def text(self) -> str:
        return f"tokens {self.start} to {self.end} stored"


class Compared(NamedTuple):
    """The worker has compared chunks of the external cache with the KV that vLLM computed for their tokens (`audit=`).

    chunks: the number of chunks. wrong: how many of them differ by more than the limit. The other fields describe the
    first wrong chunk or, if none is wrong, the one nearest to its limit. It has tokens [start, end). part: K, V, or KV.
    token: the token that differs most. error: norm of the difference divided by the norm of the computed K, V, or KV.
    """

    request: str
    chunks: int
    wrong: int
    start: int
    end: int
    layer: str
    part: str
    token: int
    error: float
    limit: float

    def text(self) -> str:
        found = f"{self.chunks} chunks of the cache compared with computed KV, {self.wrong} differ: {self.part} of"
        return f"{found} {self.layer}, tokens {self.start} to {self.end}, by {self.error:.2g} (limit {self.limit:.2g})"


class BlocksLost(NamedTuple):
    """A store of tokens [start, end) of KV group `group` reads blocks that vLLM does not keep for the request.

    blocks: "null blocks", "blocks freed before the step" or "blocks freed after the step and used again".
    """

    request: str
    group: int
    start: int
    end: int
    blocks: str

    def text(self) -> str:
        return f"tokens {self.start} to {self.end} of KV group {self.group} stored from {self.blocks}"


class Preempted(NamedTuple):
    """vLLM has freed the request's blocks. The request waits again."""

    request: str

    def text(self) -> str:
        return "preempted: its blocks are freed"


class LoadFailed(NamedTuple):
    """All or part of the load failed. vLLM rolls the request back to `computed` tokens (None: not known)."""

    request: str
    computed: int | None

    def text(self) -> str:
        return "its load failed" + ("" if self.computed is None else f", back to {self.computed} computed tokens")


class Finished(NamedTuple):
    """The request has ended, or was aborted."""

    request: str
    aborted: bool

    def text(self) -> str:
        return "aborted" if self.aborted else "finished"


class Left(NamedTuple):
    """`where` (a dictionary, a pin, a lock) still has the state of an ended request: a leak."""

    request: str
    where: str

    def text(self) -> str:
        return f"ended, and {self.where} still holds it"


class Stuck(NamedTuple):
    """The request has waited for a load for `waited` steps, but no load is in flight."""

    request: str
    waited: int

    def text(self) -> str:
        return f"waits for a load that was never started, for {self.waited} steps"


class TimedOut(NamedTuple):
    """A lookup of the request timed out after `waited` seconds. at: the time, in seconds of any monotonic clock."""

    request: str
    waited: float
    at: float

    def is_at_once_after(self, other: "TimedOut") -> bool:
        """Return True if the pause between the two lookups was shorter than the wait of this lookup."""
        return self.at - other.at < 2 * self.waited

    def text(self) -> str:
        return f"a lookup timed out after {self.waited:g} s"


class Raised(NamedTuple):
    """A hook or the scheduler raised an exception."""

    request: str
    where: str
    error: str

    def text(self) -> str:
        return f"{self.where} raises {self.error}"


class Leased(NamedTuple):
    """The request has ended. Its blocks are kept until the peer sends a notice, or for `seconds` (None: not known).

    name: the id that the peer uses for the request, if it differs from `request`.
    """

    request: str
    seconds: float | None
    name: str = ""

    def text(self) -> str:
        return "its blocks are kept for a peer" + ("" if self.seconds is None else f", for {self.seconds:g} s")


class LeaseExtended(NamedTuple):
    """The peer has renewed the lease for the first time, for `seconds` from now (None: not known)."""

    request: str
    seconds: float | None

    def text(self) -> str:
        return "the peer renews its lease" + ("" if self.seconds is None else f", for {self.seconds:g} s")


class LeaseEnded(NamedTuple):
    """The connector has reported the blocks as sent, so vLLM frees them. renewed: how often the peer renewed the lease.

    expired: True if the lease has expired, False if the peer sent a notice, None if not known.
    """

    request: str
    expired: bool | None
    renewed: int = 0

    def text(self) -> str:
        how = {None: "", True: ": its lease has expired", False: " after a notice"}
        return "its blocks are free" + how[self.expired] + (f", renewed {self.renewed} times" if self.renewed else "")


class ReadsFrom(NamedTuple):
    """The request will read the blocks of request `peer`, which another engine keeps, and then notify that engine.

    engine, peer: the engine id and request id in the request's `kv_transfer_params`.
    pushed: True if `engine` writes the blocks. It then needs no notice, and does not learn if the request ends early.
    """

    request: str
    engine: str
    peer: str
    pushed: bool = False

    def text(self) -> str:
        if self.pushed:
            return f"waits for engine {self.engine} to write the blocks of {self.peer}"
        return f"is to read the blocks that engine {self.engine} keeps of {self.peer}"
