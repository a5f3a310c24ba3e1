"""LMCache's PD mode: the sockets between prefill, decode and the router."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

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
    Problem(
        code="KVD425",
        name="p2p-peer-refuses",
        severity=Severity.SLOW,
        title="A peer answers a P2P request with an error, and the chunks are computed again.",
        shows=(
            Logged("P2P error for lookup_id <lookup>, error code: <why>", f"{_V1}/storage_backend/p2p_backend.py"),
            Logged("Receiver <why> does not exist in transfer channel", f"{_V1}/storage_backend/p2p_backend.py"),
        ),
        sentence="it says {why}",
        releases={"lmcache": ">=0.3.10.post1"},
        cause="REMOTE_XFER_HANDLER_NOT_INITIALIZED, and the line about a receiver: the peer was restarted, or never "
        "finished the handshake with this engine. P2P_SERVER_ERROR: its log of the same time has the error (its CPU "
        "cache evicted the chunk, or its transfer failed). UNKNOWN_MSG_TYPE: the two run different releases.",
        now="the same LMCache on both, and restart the engine that was not restarted; p2p_host must be an address that "
        "the peer reaches, not localhost",
        good="one release on all engines; LMCache 0.3.11 or newer connects a restarted peer anew",
        sure=False,
    ),
    Problem(
        code="KVD975",
        name="http-to-the-proxys-other-port",
        severity=Severity.HANG,
        title="An HTTP request went to the port at which LMCache's PD proxy expects notes of the prefillers.",
        shows=(
            Logged("ZMQ received non-PD message: <what>"),
            Failed(kind="ValidationError", text="Expected `object`, got `<what>`", within="zmq_pull_server"),
            Failed(kind="DecodeError", within="zmq_pull_server"),
        ),
        sentence="the proxy got something else than a note of a prefiller",
        cause="The proxy of examples/disagg_prefill has two ports: --port (9100) for clients, and --proxy-port (7500), "
        "to which prefillers report that their KV was sent. A client or a health check used the second. Before LMCache "
        "0.3.12 that ends the proxy's task, and every later request waits for ever.",
        now="send requests to --port (9100), no health check to --proxy-port, and restart the proxy",
        good="the proxy of LMCache 0.3.12 or newer, which only warns",
        threads=("https://github.com/LMCache/LMCache/pull/2287", "https://github.com/LMCache/LMCache/issues/2144"),
    ),
    Problem(
        code="KVD1192",
        name="pd-cancel-not-sent",
        severity=Severity.LEAK,
        title="A request was given up on the prefiller, and the decoder could not be asked to free what it keeps for "
        "it.",
        shows=(
            Logged(
                "[ABORT] req=<request> failed to send CancelNotif: <error>",
                at=f"{_V1}/storage_backend/pd_backend_async.py",
            ),
        ),
        sentence="request {request}: {error}",
        releases={"lmcache": ">=0.4.5"},
        cause="The chunks that were sent for it stay in the decoder's PD buffer, and later requests find less room. "
        "The "
        "decoder is gone (then nothing is lost), or its pd_peer_alloc_port does not answer.",
        now="is the decoder up: `nc -vz HOST PORT` with its pd_peer_alloc_port (plus the rank); restart it if its "
        "buffer "
        "stays full while no request runs",
        good="a decoder that stays up, and a `pd_buffer_size` with room for requests that are given up",
    ),
)
