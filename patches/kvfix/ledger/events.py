"""The events that the ledger checks. Counts are in tokens. An unknown count is None."""

from typing import NamedTuple, Protocol


def balance(hit: int, computed: int, total: int) -> int:
    """Return the number of tokens to load: hit - computed, or one less if the hit covers the whole request.

    vLLM recomputes the last token to get logits (LMCache issue 2158). If the result is below 1, there is no load.
    """
    return hit - computed - (hit == total)


class Event(Protocol):
    """The interface of the events that this module and kvfix_tools define."""

    @property
    def request(self) -> str: ...

    def text(self) -> str:
        """Describe the event and its token counts in one line, without the request id."""


class Asked(NamedTuple):
    """A lookup: the connector's hook `get_num_new_matched_tokens` has returned a number of promised tokens, or None."""

    request: str
    total: int  # tokens in the request
    computed: int  # number of computed tokens that vLLM passed to the hook, a multiple of the block size
    hit: int | None  # tokens that the external cache has from the start of the request
    promised: int | None  # None if the hook has no result yet. vLLM then calls the hook again
    asynchronous: bool = False  # True if the load runs between steps
    #: vLLM may recompute `replay` hit tokens (`prefix_replay_tokens`). vLLM then takes only whole blocks of a hit.
    replay: int = 0
    #: True if some KV groups may have fewer cached tokens than `computed`. If vLLM then takes no promised token, vLLM
    #: starts from the smallest cached prefix of all KV groups (`supports_divergent_local_hybrid_hits`).
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
    """vLLM called `update_state_after_alloc`: vLLM has allocated blocks and takes `external` of the promised tokens."""

    request: str
    external: int

    def text(self) -> str:
        return f"vLLM allocates blocks and grants {self.external} external tokens"


class Scheduled(NamedTuple):
    """A step computes `tokens` tokens of the request. Before the step, vLLM computed or loaded `computed` tokens."""

    request: str
    computed: int
    tokens: int
    capacity: int | None = None  # token slots in the request's blocks
    first: bool = False  # True if the step admits a new or preempted request

    def text(self) -> str:
        start = "admitted" if self.first else "continues"
        return f"{start} at {self.computed} computed tokens, {self.tokens} more are computed"


class LoadDue(NamedTuple):
    """The connector's metadata tell the worker to load tokens [start, end) of the request."""

    request: str
    start: int
    end: int
    block: int = 0  # tokens per block if the metadata list whole blocks (the last block may be partly filled)
    relative: bool = False  # True if `start` and `end` count from the first token that vLLM has not computed

    def text(self) -> str:
        return f"tokens {self.start} to {self.end} are to be loaded"


class Loaded(NamedTuple):
    """The worker has loaded `tokens` tokens, up to `end`. If the LoadDue event has more tokens, the load has failed."""

    request: str
    tokens: int
    end: int

    def text(self) -> str:
        return f"{self.tokens} tokens loaded, up to {self.end}"


class Stored(NamedTuple):
    """The worker stores tokens [start, end) of the request in the external cache, in this or an earlier step."""

    request: str
    start: int
    end: int
    covered: int = 0  # tokens from the start of the request that the external cache already has

    def text(self) -> str:
        return f"tokens {self.start} to {self.end} stored"


class Compared(NamedTuple):
    """The audit has compared chunks of the external cache with KV that vLLM computed for the same tokens (`audit=`).

    All fields after `wrong` describe one chunk: the first wrong chunk, or else the chunk nearest to its limit.
    """

    request: str
    chunks: int  # compared chunks
    wrong: int  # chunks that differ by more than their limit
    start: int
    end: int
    layer: str
    part: str  # "K", "V" or "KV"
    token: int  # the token that differs most
    error: float  # norm of the difference, divided by the norm of the computed K, V or KV
    limit: float

    def text(self) -> str:
        found = f"{self.chunks} chunks of the cache compared with computed KV, {self.wrong} differ: {self.part} of"
        return f"{found} {self.layer}, tokens {self.start} to {self.end}, by {self.error:.2g} (limit {self.limit:.2g})"


class BlocksLost(NamedTuple):
    """A store reads tokens [start, end) of KV group `group` from blocks that vLLM does not keep for the request."""

    request: str
    group: int
    start: int
    end: int
    blocks: str  # "null blocks", "blocks freed before the step" or "blocks freed after the step and used again"

    def text(self) -> str:
        return f"tokens {self.start} to {self.end} of KV group {self.group} stored from {self.blocks}"


class Preempted(NamedTuple):
    """vLLM has freed the request's blocks. The request waits again."""

    request: str

    def text(self) -> str:
        return "preempted: its blocks are freed"


class LoadFailed(NamedTuple):
    """The load failed, wholly or in part. vLLM rolls the request back to `computed` tokens (None: not known)."""

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
    """An ended request leaks, because `where` (a dictionary, a pin or a lock) still holds the request."""

    request: str
    where: str

    def text(self) -> str:
        return f"has ended, but {self.where} still holds the request"


class Stuck(NamedTuple):
    """The request has waited `waited` steps for a load, but no load is in flight."""

    request: str
    waited: int

    def text(self) -> str:
        return f"has waited {self.waited} steps for a load that was never started"


class TimedOut(NamedTuple):
    """A lookup of the request timed out after `waited` seconds."""

    request: str
    waited: float
    at: float  # time of the timeout, in monotonic seconds

    def is_at_once_after(self, other: "TimedOut") -> bool:
        """Return True if the pause between lookup `other` and this lookup was shorter than this lookup's wait."""
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
    """The request has ended. vLLM keeps its blocks for `seconds` (None: not known), or until a notice from the peer."""

    request: str
    seconds: float | None
    name: str = ""  # the peer's id for the request; "" if the peer uses the same id

    def text(self) -> str:
        return "its blocks are kept for a peer" + ("" if self.seconds is None else f", for {self.seconds:g} s")


class LeaseExtended(NamedTuple):
    """The peer has renewed the lease for the first time. The lease now ends after `seconds` (None: not known)."""

    request: str
    seconds: float | None

    def text(self) -> str:
        return "the peer renews its lease" + ("" if self.seconds is None else f", for {self.seconds:g} s")


class LeaseEnded(NamedTuple):
    """The connector has reported the blocks as sent, so vLLM frees them."""

    request: str
    expired: bool | None  # True if the lease has expired, False if the peer sent a notice, None if not known
    renewed: int = 0  # how often the peer renewed the lease

    def text(self) -> str:
        how = {None: "", True: ": its lease has expired", False: " after a notice"}
        return "its blocks are free" + how[self.expired] + (f", renewed {self.renewed} times" if self.renewed else "")


class ReadsFrom(NamedTuple):
    """This request will read the blocks of the request `peer` on the engine `engine`, and then notify `engine`."""

    request: str
    engine: str  # engine id in the request's `kv_transfer_params`
    peer: str  # request id in the request's `kv_transfer_params`
    pushed: bool = False  # True if `engine` writes the blocks. `engine` then gets no notice, not even after an abort

    def text(self) -> str:
        if self.pushed:
            return f"waits for engine {self.engine} to write the blocks of {self.peer}"
        return f"is to read the blocks that engine {self.engine} keeps of {self.peer}"
