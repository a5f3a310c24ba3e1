"""LMCache's PD mode: the sockets between prefill, decode and the router."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Logged, Problem

_V1 = "lmcache/v1"
_PULLS = "https://github.com/LMCache/LMCache/pull"

PROBLEMS = (
    Problem(
        code="KVD691",
        name="pd-loop-answers-no-more",
        severity=Severity.HANG,
        title="A thread of LMCache's PD or P2P mode failed once, and answers no request since.",
        shows=(
            Logged("Failed to process initialization loop: Operation cannot be accomplished in current state"),
            Logged("Failed to process mem alloc loop: Operation cannot be accomplished in current state"),
        ),
        cause="Its socket has to answer each message before it takes the next. An error in between is logged and no "
        "answer sent, so every later receive fails like this, 100 times a second; the other side waits for the answer "
        "for ever. The first line of the same loop with another reason is the error.",
        now="restart the engine that logs it, then the prefillers (they wait for its answer); before that note the "
        "first `Failed to process ... loop` with another reason: it comes back if that stays",
        good="what the first line says; for the allocation `pd_backend_mode: async` (LMCache 0.4.5 or later), which "
        "answers with the error; the initialization is so in every release",
    ),
    Problem(
        code="KVD692",
        name="pd-cache-query-unanswered",
        severity=Severity.SLOW,
        title="The decoder does not answer what it has in its cache, and prefill waits 5 seconds for each request.",
        shows=(
            Logged(
                "Cache query timed out after 5s for receiver <receiver>, resetting socket",
                at=f"{_V1}/storage_backend/pd_backend.py",
            ),
        ),
        sentence="receiver {receiver}",
        releases={"lmcache": ">=0.4.5"},
        cause="With pd_peer_query_port set on prefill, it asks the decoder on that port. The decoder listens there "
        "only if its own configuration has pd_peer_query_port too; or the port is closed, or the decoder is down.",
        now="the same `pd_peer_query_port` (one for each rank) on both sides, and open between them; or take it out on "
        "prefill: nothing is asked then",
        good="one configuration for both sides",
        threads=(f"{_PULLS}/2972",),
    ),
    Problem(
        code="KVD693",
        name="pd-transfer-given-up",
        severity=Severity.HANG,
        title="Prefill could not hand a request's KV to the decoder, and the router is not notified.",
        shows=(Logged("Async transfer task failed: <reason>", at=f"{_V1}/storage_backend/pd_backend_async.py"),),
        sentence="{reason}",
        releases={"lmcache": ">=0.4.5"},
        sure=False,
        cause="The reason in the line decides: `Failed to send objects` is NIXL or the peer (KVD532), `AllocResponse` "
        "or `Legacy senders` another release there (KVD531). LMCache takes the request back at the decoder and sends "
        "the router no notification: one that waits for it without a limit, as most releases of the example proxy do, "
        "never sends the request to decode.",
        now="let clients time out and send again; what the reason says; a router with a limit on its wait",
        good="what the reason says",
    ),
)
