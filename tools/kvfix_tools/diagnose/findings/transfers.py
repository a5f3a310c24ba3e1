"""Transfers between prefill and decode: what statistics say of them, and what the logs of both sides say together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose import problems
from kvfix_tools.diagnose.findings import Answer, Severity, finding, note

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: MB of one transfer from which on its rate says something, and MB/s that any RDMA card and NVLink exceed by far.
LARGE, SLOW = 16.0, 1000.0
#: Records that say that the other engine, or the way to it, is gone.
_LOST = frozenset({
    "KVD021", "KVD069", "KVD145", "KVD501", "KVD505", "KVD510", "KVD550", "KVD554", "KVD569", "KVD571", "KVD572",
    "KVD586", "KVD591", "KVD690", "KVD986", "KVD1056", "KVD1154", "KVD1305",
})  # fmt: skip
#: What heads the lines of one pod of several: a command, and the prefixes of `kubectl logs --prefix` and stern.
_POD = re.compile(
    rb"(?m)^[^\n]{0,80}?(?:kubectl\b[^\n]*?\blogs\b([^\n]*)|\[pod/([^\]/]+)/|([a-z0-9][a-z0-9-]{12,}) vllm \()"
)


@note("moved")
def _note_rate(log: Diagnosis, line: LogLine) -> None:
    if float(line.fields["size"]) >= LARGE:
        kept = log.memory.setdefault("moved", {"intervals": 0, "best": 0.0})
        kept["intervals"] += 1
        if float(line.fields["rate"]) >= kept["best"]:
            kept.update(best=float(line.fields["rate"]), size=line.fields["size"], line=line.evidence)


@finding("KVD1051", "kv-goes-by-tcp", Severity.SLOW, on=[""])
def kv_goes_by_tcp(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """KV moves from prefill to decode at the speed of TCP.

    Cause: UCX found no way from GPU to GPU and copies over sockets. It takes cuda_ipc for reads only over NVLink:
    between two GPUs of one node without it the pulls of NixlConnector go over TCP, at about 0.5 GB/s (vllm#52607).
    Between nodes: the container has no RDMA card, UCX_TLS or UCX_NET_DEVICES leaves it out, or UCX has no driver for
    it (AWS EFA). `UCX_PROTO_INFO=y` at the next start decides: the lines of `remote memory read` name the transport.

    Setting: one node without NVLink: `"kv_connector": "NixlPushConnector"` on both sides (vLLM 0.26 or newer, and a
    router that knows it). Between nodes: container with `--device /dev/infiniband --ulimit memlock=-1`, `unset
    UCX_TLS`, `UCX_NET_DEVICES=mlx5_0:1` (a card that `ibv_devinfo` shows as active); AWS EFA:
    `"kv_connector_extra_config": {"backends": ["LIBFABRIC"]}`.

    Good: the set-up; no release of vLLM or nixl changes the way that UCX finds.

    Normal: a network of 10 Gbit/s, and small transfers, which are not looked at.
    """
    kept = log.memory.get("moved")
    if kept is None or kept["best"] >= SLOW:
        return None
    return Answer(
        f"at best {kept['best']:.0f} MB/s in {kept['intervals']} intervals, {kept['size']} MB each",
        request="",
        verdict="unknown",
        evidence=(kept["line"],),
    )


@finding("KVD1380", "the-other-engine-died", Severity.CRASH, on=[""])
def the_other_engine_died(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Logs of several engines: one lost its peer, and another died of what is named here. That comes first.

    Cause: what the other engine says of its lost peer follows from this death, as a rule: a peer that died takes its
    connections along. Where the times of the two say the opposite, it is the other way round.

    Setting: look at the code and the hook that the sentence names; the engine's own log alone
    (`kubectl logs POD --previous`) with kvfix-diagnose has the whole of it. `"kv_load_failure_policy": "recompute"` on
    decode keeps the requests of a prefill that died.

    Good: what the exception says.
    """
    first = log.failures.first
    lost = [found for found in log.findings if found.rule.code in _LOST]
    if not lost or first is None or not log.failures.dead or first.name not in ("raised", "died"):
        return None
    if any(found.rule.severity is Severity.CRASH for found in log.findings):
        return None
    pods = {part for text in log.whole for found in _POD.findall(text) for part in found if part}
    if len(log.who.engines) < 2 and len(pods) < 2:
        return None
    fields = first.fields
    what = f"{fields.get('class') or 'fatal error'}: {fields['text']}"[:200].rstrip(": ")
    frames = fields.get("frames") or []
    at = f" at {'/'.join(frames[-1][0].split('/')[-2:])} in {frames[-1][2]}" if frames else ""
    source = f", `{fields['source']}`" if fields.get("source") else ""
    general = problems.general(first)
    return Answer(f"{what}{at}{source}", request="", verdict="unknown", evidence=(first.evidence,), record=general)
