"""Transfers between prefill and decode: what vLLM's statistics say of their speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding, note

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: MB of one transfer from which on its rate says something, and MB/s that any RDMA card and NVLink exceed by far.
LARGE, SLOW = 16.0, 1000.0


class _Moved:
    """Intervals with large transfers, and the fastest one."""

    def __init__(self) -> None:
        self.intervals = 0
        self.best: LogLine | None = None


@note("moved")
def _note_rate(log: Diagnosis, line: LogLine) -> None:
    if float(line.fields["size"]) >= LARGE:
        kept = log.state(_Moved)
        kept.intervals += 1
        if kept.best is None or float(line.fields["rate"]) >= float(kept.best.fields["rate"]):
            kept.best = line


@finding("KVD1051", "kv-goes-by-tcp", Severity.SLOW, on=[""])
def kv_goes_by_tcp(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """KV moves from prefill to decode at the speed of TCP.

    Cause: UCX found no way from GPU to GPU and copies over sockets. It takes cuda_ipc for reads only over NVLink:
    between two GPUs of one node without it the pulls of NixlConnector go over TCP, at about 0.5 GB/s (vllm#52607).
    Between nodes: the container has no RDMA card, UCX_TLS or UCX_NET_DEVICES leaves it out, or UCX has no driver for
    it (AWS EFA). `UCX_PROTO_INFO=y` at the next start decides: the lines of `remote memory read` name the transport.

    Setting: `"kv_connector": "NixlPushConnector"` on both sides, on one node without NVLink (vLLM 0.26 or newer,
    and a router that knows it). Between nodes: container with `--device /dev/infiniband --ulimit memlock=-1`,
    `unset UCX_TLS`, `UCX_NET_DEVICES=mlx5_0:1` (a card that `ibv_devinfo` shows as active); AWS EFA:
    `"kv_connector_extra_config": {"backends": ["LIBFABRIC"]}`.

    Good: the set-up; no release of vLLM or nixl changes the way that UCX finds.

    Normal: a network of 10 Gbit/s, and small transfers, which are not looked at.
    """
    kept = log.state(_Moved)
    if kept.best is None or float(kept.best.fields["rate"]) >= SLOW:
        return None
    fields = kept.best.fields
    return Answer(
        f"at best {float(fields['rate']):.0f} MB/s in {kept.intervals} intervals, {fields['size']} MB each",
        request="",
        verdict="unknown",
        evidence=(kept.best.evidence,),
    )
