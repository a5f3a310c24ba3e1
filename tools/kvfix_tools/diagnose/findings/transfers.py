"""A finding about the speed of transfers between prefill and decode, from vLLM's statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding, note

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: Minimum size of a transfer in MB for a judgement, and a rate in MB/s that RDMA and NVLink exceed by far.
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
    """Transfers from prefill to decode are slow, because KV moves over TCP.

    Cause: UCX found no direct path between the GPUs, and copies over sockets. On one node, UCX uses cuda_ipc for reads
    only over NVLink. Without NVLink the reads of NixlConnector go over TCP, at about 0.5 GB/s (vllm#52607). Between
    nodes, the container has no RDMA card, UCX_TLS or UCX_NET_DEVICES excludes the card, or UCX has no driver for it
    (AWS EFA). Start with `UCX_PROTO_INFO=y`: the lines `remote memory read` name the transport.

    Setting: `"kv_connector": "NixlPushConnector"` on both sides, on one node without NVLink (vLLM 0.26 or newer, and a
    router that supports it). Between nodes start the container with `--device /dev/infiniband --ulimit memlock=-1`,
    `unset UCX_TLS`, and set `UCX_NET_DEVICES=mlx5_0:1` (a card that `ibv_devinfo` shows as active). AWS EFA:
    `"kv_connector_extra_config": {"backends": ["LIBFABRIC"]}`.

    Good: these settings. No release of vLLM or nixl changes the path that UCX finds.

    Normal: a network of 10 Gbit/s. kvfix ignores small transfers.
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
