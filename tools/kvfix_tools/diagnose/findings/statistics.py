"""Findings from vLLM's statistics: an engine that stands still, external hit rates, slow transfers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding, note

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import Evidence, Fields, LogLine


#: A finding needs this many intervals of vLLM's statistics (10 seconds each) with requests but without a token.
IDLE = 3
#: Connectors of a decode instance that load only blocks which a request names.
BY_REQUEST = {"NixlConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"}
#: Below ROOM per cent of used KV blocks, no request waits for blocks. Above ALL per cent of external hits, a decode
#: instance computes no prompt.
ROOM, ALL = 80.0, 99.0
#: The kind of standstill: requests in the queue, a step that does not end, requests that wait for prefill.
_QUEUE, _STEP, _PREFILL = "queue", "step", "prefill"


class _Still(dict[tuple[str, str], "tuple[int, str, Evidence, str]"]):
    """{engine: (intervals without a token, text of its statistics, last line, kind of standstill)}"""


@note("stats")
def _note_standstill(log: Diagnosis, line: LogLine) -> None:
    still = log.state(_Still)
    f = line.fields
    engine = _engine(line)
    if not (f["waiting"] or f["running"]) or float(f["prompt"]) or float(f["generation"]):
        still.pop(engine, None)
        return
    count = still[engine][0] + 1 if engine in still else 1
    what = f"Running {f['running']}, Waiting {f['waiting']}, no token"
    if engine in still or len(still) < 1000:
        looks_like = _PREFILL if _awaits_prefill(log, f) else _QUEUE if f["waiting"] else _STEP
        still[engine] = (count, what, line.evidence, looks_like)


@finding("KVD202", "nothing-moves", Severity.HANG, on=["stats", ""], symptom=True)
def nothing_moves(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """The engine stands still: requests wait, and the engine computes no token.

    Cause: a step does not end, in a connector hook or on the GPU. Or the first request of the queue waits for a load
    that does not end, for a lookup without an answer, or for blocks that are not freed. Read the other findings first.
    Without one, run `kvfix dump PID`.

    Setting: `--max-num-seqs` lower. Before vLLM 0.32, asynchronous loads can block each other if there are too few
    blocks.

    Normal: an idle engine, or a prefill or a compilation that takes a minute.
    """
    return _stands(log, line, _QUEUE)


@finding("KVD1196", "step-does-not-end", Severity.HANG, on=["stats", ""], symptom=True)
def step_does_not_end(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """The engine stands still: requests run, but a step of the engine does not end.

    Cause: a worker waits in a connector hook for a load or a transfer, in a collective that another rank does not join,
    or on the GPU. Or a compilation or a very long prefill runs. The stacks of the workers show which.

    Setting: `kvfix dump PID` (or `py-spy dump --pid` of each worker) during the standstill. If the stack is in a
    connector hook, read the log of its prefill instance, store or server. If it is in all_reduce or broadcast, find the
    rank whose stack differs. Then restart. A start without --kv-transfer-config shows if the connector is the cause.

    Good: a fix of the cause that the stacks show.

    Normal: a prefill or a compilation that takes a minute.
    """
    return _stands(log, line, _STEP)


def _awaits_prefill(log: Diagnosis, fields: Fields) -> bool:
    """Return True for a decode instance with free blocks on which all requests wait for KV of a prefill instance.

    If the log does not name the connector, all waiting requests must be deferred, and all hits external.
    """
    of_decode = log.who.connectors <= BY_REQUEST and "kv_producer" not in log.who.roles
    if not log.who.connectors:
        of_decode = fields.get("deferred") == fields["waiting"] and float(fields.get("external") or 0) > ALL
    return bool(of_decode and fields["waiting"] and not fields["running"] and float(fields.get("usage") or 0) < ROOM)


@finding("KVD1065", "decode-waits-for-prefill", Severity.HANG, on=["stats", ""], symptom=True)
def decode_waits_for_prefill(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Requests wait on a decode instance with free blocks, because their KV does not arrive from the prefill instance.

    Cause: the transfer did not begin, or its end was not reported. The prefill instance died, freed the blocks before
    decode read them, or did not answer the handshake, or a notification was lost. vLLM's scheduler has no timeout for
    this wait (0.33.0). The prefill log of that time shows which (`Releasing expired KV blocks`, a traceback, a
    restart). So does decode's log with `VLLM_LOGGING_LEVEL=DEBUG`, which names requests (`is still in
    WAITING_FOR_REMOTE_KVS state`).

    Setting: `nc -vz HOST PORT` from decode, with prefill's VLLM_NIXL_SIDE_CHANNEL_HOST and PORT. `kvfix dump PID` shows
    what the workers wait for. Then restart decode, and prefill if it died. `"kv_load_failure_policy": "recompute"` on
    decode ends the wait if the connector reports the failure.

    Good: a prefill instance with a fixed address that does not restart, and a router that aborts on both sides.
    """
    return _stands(log, line, _PREFILL)


def _engine(line: LogLine) -> tuple[str, str]:
    return str(line.fields.get("engine", "")), line.process


def _stands(log: Diagnosis, line: LogLine | None, rule: str) -> Answer | None:
    """Return an answer if an engine has computed nothing for IDLE intervals, in a standstill of this kind."""
    still = log.state(_Still)
    if line is None:
        return _still_at_the_end(log, still, rule)
    count, what, _, looks_like = still.get(_engine(line), (0, "", None, ""))
    if looks_like != rule or count < IDLE:
        return None
    verdict = "violated" if rule == _QUEUE else "unknown"  # one step may take so long
    return Answer(f"{what} for {count} intervals", verdict=verdict)


def _still_at_the_end(log: Diagnosis, still: _Still, rule: str) -> Answer | None:
    """Return an answer for a log that ends in a standstill.

    An engine without progress logs its statistics once at INFO. From then on vLLM logs them at DEBUG (loggers.py
    0.12.0:194 to 0.32.0:272).
    """
    for count, what, evidence, looks_like in still.values():
        if count < IDLE and looks_like == rule and not log.failures.ending:
            sentence = f"{what}, and no later statistics: at INFO vLLM logs none while it computes nothing"
            return Answer(sentence, verdict="unknown", evidence=(evidence,), note=True)
    return None


#: A finding needs this many intervals of vLLM's statistics with prompts, and a local hit in one of them.
PROMPTS = 5


class External:
    """Intervals of vLLM's statistics with prompts: their number, and the highest hit rates in per cent."""

    def __init__(self) -> None:
        self.intervals = 0
        self.external = self.local = 0.0
        self.last: Evidence | None = None


@note("stats")
def _note_external(log: Diagnosis, line: LogLine) -> None:
    fields, kept = line.fields, log.state(External)
    if fields.get("external") is not None and float(fields["prompt"]):
        kept.intervals += 1
        kept.external = max(kept.external, float(fields["external"]))
        kept.local = max(kept.local, float(fields.get("local") or 0))
        kept.last = line.evidence


@finding("KVD976", "external-cache-never-hits", Severity.NOTE, on=[""])
def external_cache_never_hits(log: Diagnosis, line: LogLine) -> Answer | None:
    """No token comes from the connector's cache, although prompts have a common beginning.

    Cause: usually the common part is still on the GPU: vLLM's own cache answers first, and asks the connector only for
    the rest. Or the GPU evicts more KV between two uses than the CPU tier holds. Or one KV group (drafts, state, a
    window) never has a hit, and the whole hit is 0 (vLLM before 0.32). Or engines that share a store hash differently
    (PYTHONHASHSEED). Or `store_threshold` delays the store of blocks.

    Setting: `--kv-offloading-size` larger, if `GPU KV cache usage` is near 100 %. If the usage is much lower, do
    nothing. Try once without `--speculative-config`: if hits appear, upgrade to vLLM 0.32.0. For engines that share a
    store, `export PYTHONHASHSEED=0` on every engine.

    Normal: the first minutes, and prompts that fit into the GPU's cache.
    """
    kept = log.state(External)
    connectors = log.who.connectors - {"NixlConnector", "MooncakeConnector", "MoRIIOConnector", "P2pNcclConnector"}
    if kept.intervals < PROMPTS or kept.external or not kept.local:
        return None
    if log.counts["asked"] or log.counts["mp_prefetched"] or log.findings or log.failures.dead or not connectors:
        return None
    return Answer(
        f"{kept.intervals} intervals with prompts, up to {kept.local}% from the GPU's own cache, 0.0% external",
        verdict="unknown",
        evidence=(kept.last,),
    )


@finding("KVD539", "every-group-taken-for-drafts", Severity.SLOW, on=["draft_groups"])
def every_group_taken_for_drafts(log: Diagnosis, line: LogLine) -> Answer | None:
    """With speculative decoding, OffloadingConnector shortens every hit, or has no hits at all.

    Cause: if no KV group is marked as the draft model's, vLLM before 0.32 takes all groups for draft groups, and drops
    the last chunk of each hit (vllm#52735). A KV group with state or with a window needs its last chunk, so the whole
    hit is 0. If `External prefix cache hit rate` stays at 0.0%, this is the cause.

    Setting: `vllm serve` without `--speculative-config`, or without OffloadingConnector (`--kv-offloading-size`), which
    otherwise only uses memory.

    Good: upgrade to vLLM 0.32.0 or newer.

    Normal: a list of the draft model's groups only, such as `[3]`.
    """
    groups = [int(number) for number in re.findall(r"\d{1,6}", line.fields["groups"])]
    if len(groups) < 2 or groups != list(range(len(groups))) or log.releases.within("vllm", ">=0.32"):
        return None
    return Answer(f"vLLM takes all {len(groups)} groups for groups of the draft model", verdict="unknown")


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
    only if there is NVLink. Without NVLink the reads of NixlConnector go over TCP, at about 0.5 GB/s (vllm#52607).
    Between
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
        verdict="unknown",
        evidence=(kept.best.evidence,),
    )
