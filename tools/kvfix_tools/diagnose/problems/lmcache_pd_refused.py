"""LMCache's PD and P2P modes: messages that do not fit, transfers in a state of their own, settings refused."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_ASYNC = "lmcache/v1/storage_backend/pd_backend_async.py"
_CHANNELS = "lmcache/v1/transfer_channel/"

PROBLEMS = (
    Problem(
        code="KVD052",
        name="pd-message-of-another-kind",
        severity=Severity.HANG,
        title="A port of LMCache's PD or P2P mode got a message that is meant for another port, or of another release.",
        shows=(
            Failed(kind="ValueError", text="Expected AllocRequest from remote peer, got <what>", at=_ASYNC),
            Failed(kind="AssertionError", text="The request from the remote peer is not a AllocRequest"),
            Failed(kind="AssertionError", text="Expected CacheQueryRequest, got <what>"),
            Failed(kind="ValueError", text="Unsupported InitMsg type: <what>"),
            Failed(kind="ValueError", text="Unsupported InitSideMsg type: <what>"),
            Logged("Failed to process alloc request from <peer>: <what>", at=_ASYNC),
            Logged("Unknown message type: <what>"),
        ),
        sure=False,
        cause="pd_peer_init_port, pd_peer_alloc_port and pd_peer_query_port (p2p_init_ports, p2p_lookup_ports) are "
        "three listeners; the sender's or the proxy's configuration names one for another, two engines of a host "
        "share a number, or the two sides run different LMCache releases.",
        now="the same three ports on both sides and in the proxy's --decoder-init-port and --decoder-alloc-port, "
        "each its own, one for each rank; one LMCache release; restart the decoder, then the prefillers",
        good="one configuration and one release for both sides",
    ),
    Problem(
        code="KVD053",
        name="pd-protocol-violated",
        severity=Severity.HANG,
        title="Prefill and decode of LMCache's PD mode do not agree on a request's chunks.",
        shows=(
            Failed(kind="RuntimeError", text="Invalid already_sent_indexes from receiver: <what>"),
            Failed(kind="RuntimeError", text="Request <request> protocol violation: declared total_chunks=", at=_ASYNC),
            Logged("protocol violation: declared total_chunks=<counts>"),
        ),
        releases={"lmcache": ">=0.4.5"},
        cause="The sender announces how many chunks a request has, then asks for room in batches. More come than "
        "were announced: another chunk_size on the two sides, a request id that comes twice (a client that tries "
        "again), or preemption on prefill, after which the prompt is sent anew.",
        now="the same chunk_size and LMCache release on both sides; new request ids for tries of the client; "
        "--max-num-seqs of prefill so small that nothing is preempted; the request itself is computed by decode",
        good="one configuration, and ids that are never used twice",
    ),
    Problem(
        code="KVD054",
        name="pd-proxy-not-notified",
        severity=Severity.HANG,
        title="Prefill could not tell the proxy that a request's KV has been sent.",
        shows=(Logged("Failed to send ProxyNotif for req <request>: <reason>", at=_ASYNC),),
        sentence="request {request}: {reason}",
        releases={"lmcache": ">=0.4.5"},
        cause="The proxy starts decode when this message comes, on pd_proxy_host and pd_proxy_port: it is down, "
        "listens on another port or address, or belongs to a router that needs no such message.",
        now="nc -vz PD_PROXY_HOST PD_PROXY_PORT from prefill; start the proxy with --proxy-port as pd_proxy_port "
        "says; a router that does not wait for it: pd_skip_proxy_notification: true (and pd_backend_mode: sync where "
        "it is not heard)",
        good="proxy and configuration that name one port",
        threads=("https://github.com/LMCache/LMCache/pull/2874",),
    ),
    Problem(
        code="KVD055",
        name="pd-transfer-in-no-known-state",
        severity=Severity.HANG,
        title="NIXL answered LMCache's channel with a state of a transfer that it does not know.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Transfer status is <state>, expected DONE",
                at=_CHANNELS + "nixl_channel.py",
            ),
            Logged("Error in read operation"),
        ),
        sure=False,
        cause="`ERR` is handled before; another word is of a newer nixl (0.8 and later tell errors apart). It means "
        "that the transfer did not end well: the peer died or restarted, or UCX lost the connection (`UCX  ERROR` "
        "before it).",
        now="restart the decoder, then the prefillers; the same nixl on both; without RDMA "
        "`UCX_TLS=tcp,cuda_copy,cuda_ipc` on both",
        good="the nixl release that this LMCache asks for (requirements), and a stable link",
    ),
    Problem(
        code="KVD056",
        name="pd-channel-refused",
        severity=Severity.CRASH,
        title="LMCache's transfer channel cannot be made as it is configured.",
        shows=(
            Failed(kind="AssertionError", text="`backends` must be provided to create nixl transfer channel."),
            Failed(
                kind="ValueError",
                text="Unsupported device type '<device>' for NIXL",
            ),
            Failed(kind="NotImplementedError", text="Sync mode not supported in PySocketChannel"),
            Failed(kind="NotImplementedError", text="Sync mode not supported in MockMemoryChannel"),
            Failed(kind="NotImplementedError", text="Sending raw bytes is not supported in NIXL channel"),
        ),
        cause="The message names it: nixl_backends is not set, pd_buffer_device is of a kind that NIXL does not move "
        "(cpu, cuda, xpu and hpu it does), or the channel is one for P2P while PD needs nixl.",
        now="`transfer_channel: nixl`, `nixl_backends: [UCX]`, `pd_buffer_device: cuda` (or cpu) on both sides; "
        "restart",
        good="the configuration",
    ),
    Problem(
        code="KVD057",
        name="pd-initialization-fails",
        severity=Severity.HANG,
        title="A peer's initialization failed in LMCache's NIXL channel, and the peer waits for the answer.",
        shows=(Logged("Failed to process initialization loop: <reason>", at=_CHANNELS + "nixl_channel.py"),),
        sentence="{reason}",
        sure=False,
        cause="The reason decides: NIXL_ERR or a name of nixl: the peer's metadata is of another nixl release or of "
        "a card that is not reached; `ValidationError` or `Unsupported`: another LMCache release or another port's "
        "message. No answer goes out, so that the peer waits and the loop fails from then on (KVD691).",
        now="one LMCache and one nixl release on both sides; pd_peer_init_port for initialization only; restart the "
        "one that logs it, then its peers",
        good="one image for prefill and decode",
    ),
    Problem(
        code="KVD058",
        name="p2p-handler-crashed",
        severity=Severity.SLOW,
        title="LMCache's handler for other engines' P2P requests failed, and starts anew.",
        shows=(Logged("Peer request handler crashed: <reason>"),),
        sentence="{reason}",
        sure=False,
        cause="The reason decides: a message that it cannot read (another LMCache release), or a socket error (the "
        "port p2p_lookup_ports is taken by another process, or the peer went away). The peer that asked sees a "
        "time-out and computes the prompt.",
        now="one LMCache release for all peers; ss -ltnp for the port of p2p_lookup_ports; restart if it comes again "
        "and again",
        good="one release, and a port of its own for each rank",
    ),
)
