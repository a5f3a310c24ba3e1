"""EngineCore or a worker died in a connector hook. What the exception's text and traceback tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding, note

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: How some builds of LMCache put `assert len(slot_mapping) == len(token_ids)` into words.
_DESYNC = "Slot mapping and token IDs length mismatch"
#: What vLLM calls on the way from an abort to the connector.
_ABORTS = ("self._process_aborts_queue()", "self.abort_requests(", "self._connector_finished(")


def _is(line: LogLine, meaning: str) -> bool:
    return bool(line.fields["meaning"] == meaning)


def _asserts(line: LogLine, source: str, function: str = "") -> bool:
    """A bare assertion, by its source; or by its function where the source is not in the log."""
    fields = line.fields
    if fields["type"] != "AssertionError" or fields["text"]:
        return False
    within = not function or any(frame[2] == function for frame in fields["frames"][-3:])
    return within and source in fields["source"]


def _mismatch(line: LogLine) -> str:
    f = line.fields
    return (
        f"granted {f['granted']}, but hit {f['hit']} - computed {f['computed']}"
        f"{' - 1' if f['spare'] else ''} = {f['hit'] - f['computed'] - f['spare']}; vLLM had {f['computed']}"
    )


def _capped(log: Diagnosis, line: LogLine) -> bool | None:
    """Whether a load that was capped explains the mismatch; None: it may."""
    fields = line.fields
    if fields["granted"] != fields["hit"]:
        return True
    recent = log.releases.within("lmcache", ">=0.4.7")
    if recent is not None:
        return bool(recent)
    history = log.ledger.histories.get(line.request)
    if history is not None and history.asked is not None and history.asked.hit is not None:
        return bool(history.asked.hit > fields["hit"])
    return None


@finding("KVD101", "cached-hit-promised-whole", Severity.CRASH, on=["raised"])
def cached_hit_promised_whole(log: Diagnosis, line: LogLine) -> Answer | None:
    """A request was asked about again, and promised its whole hit: what vLLM had was not subtracted."""
    if _asserts(line, "assert num_new_tokens > 0") and log.releases.within("lmcache", "==0.3.10"):
        return Answer("the raw hit is larger than what remains of the request, so nothing is left to compute")
    if not _is(line, "mismatch") or line.fields["computed"] == 0 or _capped(log, line):
        return None
    if _capped(log, line) is None:
        return Answer(
            _mismatch(line) + ". The log does not tell the release of LMCache: in 0.3.10 it is this; from 0.4.7 on, "
            "with max_tokens_per_load set, it is KVD102",
            verdict="unknown",
        )
    return Answer(_mismatch(line))


@finding("KVD102", "capped-load-unaligned", Severity.CRASH, on=["raised"])
def capped_load_unaligned(log: Diagnosis, line: LogLine) -> Answer | None:
    """A load was capped by max_tokens_per_load; promise and load end at different tokens.

    Setting: leave `max_tokens_per_load` at 0.
    """
    if not _is(line, "mismatch") or not _capped(log, line):
        return None
    return Answer(_mismatch(line) + "; the load was capped to whole chunks, the promise was not")


def _resumed(line: LogLine) -> str:
    f = line.fields
    return f"resumed with {f['computed']} computed tokens, the connector expects {f['expected']}"


def _kept_back(log: Diagnosis, line: LogLine) -> bool:
    """Return True if the last answer before the crash was `< min_retrieve`."""
    return line.request in log.state(_BelowMinimum)


class _BelowMinimum(dict[str, tuple[int, int]]):
    """{request: (tokens that were hit and not loaded, the minimum)}"""


@note("asked")
def _note_min_retrieve(log: Diagnosis, line: LogLine) -> None:
    if "least" in line.fields:
        noted = log.state(_BelowMinimum)
        if len(noted) < 50_000:
            noted[line.request] = (line.fields["need"], line.fields["least"])


@finding("KVD103", "resume-below-min-retrieve", Severity.CRASH, on=["raised"])
def resume_below_min_retrieve(log: Diagnosis, line: LogLine) -> Answer | None:
    """A preempted request whose hit was not loaded (below min_retrieve_tokens) is expected to have it.

    Setting: leave `min_retrieve_tokens` at 0.
    """
    if not _is(line, "resume_differs") or not _kept_back(log, line):
        return None
    need, least = log.state(_BelowMinimum)[line.request]
    return Answer(f"{_resumed(line)}: {need} tokens were hit and not loaded, being fewer than min_retrieve {least}")


@finding("KVD104", "resume-without-load-spec", Severity.CRASH, on=["raised"])
def resume_without_load_spec(log: Diagnosis, line: LogLine) -> Answer | None:
    """A preempted request was never looked up, as on a kv_producer, and is expected to have been.

    Setting: on a prefill instance (`kv_role` kv_producer) more KV blocks, or fewer requests at once, so that nothing is
    preempted.
    """
    return Answer("preempted and resumed; no lookup was made for it") if _is(line, "no_load_spec") else None


@finding("KVD105", "resume-after-full-hit", Severity.CRASH, on=["raised"])
def resume_after_full_hit(log: Diagnosis, line: LogLine) -> Answer | None:
    """A preempted request is hit whole: vLLM computes its last token again, the connector expects it too."""
    fields = line.fields
    if not _is(line, "resume_differs") or _kept_back(log, line) or fields["computed"] != fields["expected"] - 1:
        return None
    return Answer(f"{_resumed(line)}: all of it was hit, and its last token is computed again")


@finding("KVD106", "resume-with-more-than-cached", Severity.CRASH, on=["raised"])
def resume_with_more_than_cached(log: Diagnosis, line: LogLine) -> Answer | None:
    """A preempted request of which vLLM has more than LMCache is expected to have what LMCache has."""
    fields = line.fields
    if not _is(line, "resume_differs") or fields["against"] != "lmcache_cached_tokens":
        return None
    return Answer(_resumed(line)) if fields["computed"] > fields["expected"] else None


@finding("KVD107", "resume-without-grant", Severity.CRASH, on=["raised"])
def resume_without_grant(log: Diagnosis, line: LogLine) -> Answer | None:
    """A preempted request was promised a load that vLLM did not take, and is expected to have it.

    Cause: vLLM may take nothing of a promise: another connector of a MultiConnector was chosen, prompt_logprobs are
    asked for, or its own prefix hit ends inside a block. The connector goes by its promise.

    Setting: no `prompt_logprobs`; more KV blocks, so that nothing is preempted.
    """
    fields = line.fields
    if not _is(line, "resume_differs") or _kept_back(log, line) or fields["computed"] == fields["expected"] - 1:
        return None
    if fields["against"] == "lmcache_cached_tokens" and fields["computed"] > fields["expected"]:
        return None
    history = log.ledger.histories.get(line.request)
    if history is None or history.asked is None:
        sentence = f"{_resumed(line)}. The log does not have its lookup: below min_retrieve_tokens it is KVD103"
        return Answer(sentence, verdict="unknown")
    return Answer(f"{_resumed(line)}: what was promised was not granted")


@finding("KVD108", "abort-asserts-engine", Severity.CRASH, on=["raised"])
def abort_asserts_engine(log: Diagnosis, line: LogLine) -> Answer | None:
    """A request was aborted, and the scheduler's side is asserted to have a cache engine.

    Setting: `enable_scheduler_bypass_lookup: true` gives the scheduler's side one.
    """
    if _asserts(line, "assert self.lmcache_engine is not None", "request_finished"):
        return Answer("a client went away, and EngineCore died of it", request="")
    if log.who.lmcache and any(_asserts(line, call) for call in _ABORTS):  # vLLM itself asserts nothing there
        return Answer("an assertion while a request is aborted; the traceback is cut before it", "", "unknown")
    return None


@finding("KVD109", "transfer-of-unknown-request", Severity.CRASH, on=["raised"])
def transfer_of_unknown_request(log: Diagnosis, line: LogLine) -> Answer | None:
    """A load or store of a request that is gone was reported done, and vLLM asserts that it knows it.

    Setting: `kv_load_failure_policy: recompute` avoids it after failed loads, not after aborts.
    """
    if _asserts(line, "assert req_id in self.requests", "_update_from_kv_xfer_finished"):
        policy = ": kv_load_failure_policy `fail` ended it, `recompute` keeps it" if log.counts["kv_failing"] else ""
        return Answer(f"a transfer of a request was reported done that vLLM had freed already{policy}", request="")
    return None


@finding("KVD110", "statistics-of-aborted-request", Severity.CRASH, on=["raised"])
def statistics_of_aborted_request(log: Diagnosis, line: LogLine) -> Answer | None:
    """A client asked for cache statistics and went away before the first lookup.

    Setting: clients leave `cached_token_stats` (`num_lmcache_extra_cached_tokens`) out of kv_transfer_params.
    """
    if not _is(line, "no_tracker"):
        return None
    return Answer("aborted before its first lookup, and asked for statistics: there is no tracker of it")


@finding("KVD111", "load-not-granted", Severity.CRASH, on=["raised"])
def load_not_granted(log: Diagnosis, line: LogLine) -> Answer | None:
    """A request that vLLM computes itself was loaded all the same, and its end of load is not expected.

    Setting: no `prompt_logprobs`; the LMCache connector alone, not in a MultiConnector.
    """
    if not _asserts(line, "assert RequestStatus.is_finished(req.status)"):
        return None
    lmcache = any(name.startswith(("LMCache", "Multi")) for name in log.who.connectors)  # KVD659: others
    return Answer("a load was reported done of a request that waits for none", request="") if lmcache else None


@finding("KVD112", "failed-load-keeps-tokens", Severity.CRASH, on=["raised"])
def failed_load_keeps_tokens(log: Diagnosis, line: LogLine) -> Answer | None:
    """A load failed, vLLM took tokens back, and the tracker kept them: what is saved has no slots.

    Cause: a load came short (a remote store that is slow or gone, chunks that were evicted), vLLM rolled the request
    back, and the connector's tracker was not: it has more tokens than the request has slots. In 0.4.1 to 0.4.6, which
    roll it back, a preemption leaves the two apart.

    Good: LMCache 0.4.7 or newer: 0.4.1 takes the tokens back after a failed load, and from 0.4.7 on no difference ends
    the worker (KVD307).
    """
    if line.fields["type"] == "AssertionError" and line.fields["text"].startswith(_DESYNC):
        return Answer("more token ids than slots in a save", request="", verdict="unknown")
    if not _asserts(line, "assert len(slot_mapping) == len(token_ids)") or "_DCP" in line.process:
        return None
    failed = log.counts["load_failed"] + log.counts["short"]
    sentence = f"more token ids than slots in a save; {failed} lines tell of failed loads before it"
    return Answer(sentence, request="", verdict="violated" if failed else "unknown")


@finding("KVD113", "prompt-embeds", Severity.CRASH, on=["raised"])
def prompt_embeds(log: Diagnosis, line: LogLine) -> Answer | None:
    """A prompt was given as embeddings: it has no token ids to count.

    Setting: no requests with `prompt_embeds` (`--enable-prompt-embeds` off).
    """
    fields = line.fields
    if fields["type"] != "TypeError" or "NoneType" not in fields["text"] or "len()" not in fields["text"]:
        return None
    in_adapter = any(
        "lmcache" in file and function == "from_new_request" for file, _, function in fields["frames"][-2:]
    )
    return Answer("a request without token ids was given to the connector", request="") if in_adapter else None


@finding("KVD114", "lookup-given-up-asked-again", Severity.CRASH, on=["raised"])
def lookup_given_up_asked_again(log: Diagnosis, line: LogLine) -> Answer | None:
    """An asynchronous lookup took too long, was given up, and the next question about it kills EngineCore.

    Setting: `enable_async_loading: false`, or a longer `lookup_timeout_ms`.
    """
    fields = line.fields
    if fields["type"] != "KeyError" or not any("async_lookup" in frame[0] for frame in fields["frames"][-3:]):
        return None
    request = fields["text"].strip("'\"")
    return Answer(f"{log.counts['lookup_given_up']} lookups were given up before", request=request)


@finding("KVD115", "chunk-released-twice", Severity.CRASH, on=["raised"])
def chunk_released_twice(log: Diagnosis, line: LogLine) -> Answer | None:
    """A chunk was found that has no memory any more.

    Setting: `enable_async_loading: false`.
    """
    if not (
        _asserts(line, "assert memory_obj.tensor is not None") or _asserts(line, "assert memory_obj_tensor is not None")
    ):
        return None
    recent = log.releases.within("lmcache", ">=0.4.1")
    old = any(file.endswith("/gpu_connector.py") for file, _, _ in line.fields["frames"][-4:])  # up to 0.3.13
    if recent is False or (recent is None and old):
        return None  # with Mooncake it is KVD801
    return Answer(
        f"a listed chunk has no tensor; double unpins before it: {log.counts['double_unpin']}",
        request="",
        verdict="violated" if recent else "unknown",
    )


@finding("KVD117", "context-parallel-in-process", Severity.CRASH, on=["raised", "logged"])
def context_parallel_in_process(log: Diagnosis, line: LogLine) -> Answer | None:
    """LMCacheConnectorV1 runs with decode context parallelism, which it does not support.

    Cause: each rank holds a part of the tokens' slots; the adapter counts the slots of the whole request, and a save or
    a lookup fails. No release of it (0.3.9 to 0.5.6) knows of context parallelism, nor refuses it at the start.

    Setting: `vllm serve` without `--decode-context-parallel-size` (`-dcp`).

    Good: LMCacheMPConnector of LMCache 0.5.5 or newer, which supports it; LMCacheConnectorV1 does in no release.
    """
    if "_DCP" not in line.process:
        return None
    worker = line.process.partition(" ")[0]
    if line.name == "logged":
        fails = b"Error processing request from scheduler" in line.body
        return Answer(f"{worker}: its asynchronous lookups fail", request="") if fails else None
    if not _asserts(line, "assert len(slot_mapping) == len(token_ids)"):
        return None
    return Answer(f"{worker}: more token ids than this rank has slots", request="")
