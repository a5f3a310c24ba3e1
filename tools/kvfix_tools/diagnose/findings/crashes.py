"""EngineCore or a worker died in a connector hook. What the exception's text and traceback tell."""

from __future__ import annotations

from typing import Any

from kvfix_tools.diagnose.findings import Answer, Severity, finding, note

#: Consequences of a death, not its cause.
_ECHOES = ("EngineDeadError", "EngineCore", "Engine core initialization failed", "WorkerProc initialization failed")


def _is(seen: Any, meaning: str) -> bool:
    return bool(seen.fields["meaning"] == meaning)


def _asserts(seen: Any, source: str, function: str = "") -> bool:
    """A bare assertion, by its source; or by its function where the source is not in the log."""
    fields = seen.fields
    if fields["type"] != "AssertionError" or fields["text"]:
        return False
    within = not function or any(frame[2] == function for frame in fields["frames"][-3:])
    return within and source in fields["source"]


def _mismatch(seen: Any) -> str:
    f = seen.fields
    return (
        f"granted {f['granted']}, but hit {f['hit']} - computed {f['computed']}"
        f"{' - 1' if f['spare'] else ''} = {f['hit'] - f['computed'] - f['spare']}; vLLM had {f['computed']}"
    )


def _capped(case: Any, seen: Any) -> bool | None:
    """Whether a load that was capped explains the mismatch; None: it may."""
    fields = seen.fields
    if fields["granted"] != fields["hit"]:
        return True
    recent = case.releases.within("lmcache", ">=0.4.7")
    if recent is not None:
        return bool(recent)
    story = case.ledger.stories.get(seen.request)
    if story is not None and story.asked is not None and story.asked.hit is not None:
        return bool(story.asked.hit > fields["hit"])
    return None


@finding("KVD101", "cached-hit-promised-whole", Severity.CRASH, on=["raised"], fixes=["KVF001"])
def cached_hit_promised_whole(case: Any, seen: Any) -> Answer | None:
    """A request was asked about again, and promised its whole hit: what vLLM had was not subtracted."""
    if _asserts(seen, "assert num_new_tokens > 0") and case.releases.within("lmcache", "==0.3.10"):
        return Answer("the raw hit is larger than what remains of the request, so nothing is left to compute")
    if not _is(seen, "mismatch") or seen.fields["computed"] == 0 or _capped(case, seen):
        return None
    if _capped(case, seen) is None:
        return Answer(
            _mismatch(seen) + ". The log does not tell the release of LMCache: in 0.3.10 it is this; from 0.4.7 on, "
            "with max_tokens_per_load set, it is KVD102",
            verdict="unknown",
        )
    return Answer(_mismatch(seen))


@finding("KVD102", "capped-load-unaligned", Severity.CRASH, on=["raised"], fixes=["KVF003"])
def capped_load_unaligned(case: Any, seen: Any) -> Answer | None:
    """A load was capped by max_tokens_per_load; promise and load end at different tokens.

    Setting: leave `max_tokens_per_load` at 0.
    """
    if not _is(seen, "mismatch") or not _capped(case, seen):
        return None
    return Answer(_mismatch(seen) + "; the load was capped to whole chunks, the promise was not")


def _resumed(seen: Any) -> str:
    f = seen.fields
    return f"resumed with {f['computed']} computed tokens, the connector expects {f['expected']}"


def _kept_back(case: Any, seen: Any) -> bool:
    """The last answer before the crash was `< min_retrieve`."""
    least = case.memory.get("least", {})
    return seen.request in least


@note("asked")
def _note_min_retrieve(case: Any, seen: Any) -> None:
    """What KVD103 has to know."""
    if "least" in seen.fields:
        noted = case.memory.setdefault("least", {})
        if len(noted) < 50_000:
            noted[seen.request] = (seen.fields["need"], seen.fields["least"])


@finding("KVD103", "resume-below-min-retrieve", Severity.CRASH, on=["raised"], fixes=["KVF002"])
def resume_below_min_retrieve(case: Any, seen: Any) -> Answer | None:
    """A preempted request whose hit was not loaded (below min_retrieve_tokens) is expected to have it.

    Setting: leave `min_retrieve_tokens` at 0.
    """
    if not _is(seen, "resume_differs") or not _kept_back(case, seen):
        return None
    need, least = case.memory["least"][seen.request]
    return Answer(f"{_resumed(seen)}: {need} tokens were hit and not loaded, being fewer than min_retrieve {least}")


@finding("KVD104", "resume-without-load-spec", Severity.CRASH, on=["raised"], fixes=["KVF002"])
def resume_without_load_spec(case: Any, seen: Any) -> Answer | None:
    """A preempted request was never looked up, as on a kv_producer, and is expected to have been.

    Setting: on a prefill instance (`kv_role` kv_producer) more KV blocks, or fewer requests at once, so that nothing is
    preempted.
    """
    return Answer("preempted and resumed; no lookup was made for it") if _is(seen, "no_load_spec") else None


@finding("KVD105", "resume-after-full-hit", Severity.CRASH, on=["raised"], fixes=["KVF002"])
def resume_after_full_hit(case: Any, seen: Any) -> Answer | None:
    """A preempted request is hit whole: vLLM computes its last token again, the connector expects it too."""
    fields = seen.fields
    if not _is(seen, "resume_differs") or _kept_back(case, seen) or fields["computed"] != fields["expected"] - 1:
        return None
    return Answer(f"{_resumed(seen)}: all of it was hit, and its last token is computed again")


@finding("KVD106", "resume-with-more-than-cached", Severity.CRASH, on=["raised"], fixes=["KVF002"])
def resume_with_more_than_cached(case: Any, seen: Any) -> Answer | None:
    """A preempted request of which vLLM has more than LMCache is expected to have what LMCache has."""
    fields = seen.fields
    if not _is(seen, "resume_differs") or fields["against"] != "lmcache_cached_tokens":
        return None
    return Answer(_resumed(seen)) if fields["computed"] > fields["expected"] else None


@finding("KVD107", "resume-without-grant", Severity.CRASH, on=["raised"], fixes=["KVF002"])
def resume_without_grant(case: Any, seen: Any) -> Answer | None:
    """A preempted request was promised a load that vLLM did not take, and is expected to have it.

    Cause: vLLM may take nothing of a promise: another connector of a MultiConnector was chosen, prompt_logprobs are
    asked for, or its own prefix hit ends inside a block. The connector goes by its promise.

    Setting: no `prompt_logprobs`; more KV blocks, so that nothing is preempted.
    """
    fields = seen.fields
    if not _is(seen, "resume_differs") or _kept_back(case, seen) or fields["computed"] == fields["expected"] - 1:
        return None
    if fields["against"] == "lmcache_cached_tokens" and fields["computed"] > fields["expected"]:
        return None
    return Answer(f"{_resumed(seen)}: what was promised was not granted")


@finding("KVD108", "abort-asserts-engine", Severity.CRASH, on=["raised"], fixes=["KVF004"])
def abort_asserts_engine(case: Any, seen: Any) -> Answer | None:
    """A request was aborted, and the scheduler's side is asserted to have a cache engine.

    Setting: `enable_scheduler_bypass_lookup: true` gives the scheduler's side one.
    """
    if _asserts(seen, "assert self.lmcache_engine is not None", "request_finished"):
        return Answer("a client went away, and EngineCore died of it", request="")
    return None


@finding("KVD109", "transfer-of-unknown-request", Severity.CRASH, on=["raised"], fixes=["KVF201"])
def transfer_of_unknown_request(case: Any, seen: Any) -> Answer | None:
    """A load or store of a request that is gone was reported done, and vLLM asserts that it knows it.

    Setting: `kv_load_failure_policy: recompute` avoids it after failed loads, not after aborts.
    """
    if _asserts(seen, "assert req_id in self.requests", "_update_from_kv_xfer_finished"):
        return Answer("a transfer of a request was reported done that vLLM had freed already", request="")
    return None


@finding("KVD110", "statistics-of-aborted-request", Severity.CRASH, on=["raised"], fixes=["KVF101"])
def statistics_of_aborted_request(case: Any, seen: Any) -> Answer | None:
    """A client asked for cache statistics and went away before the first lookup.

    Setting: clients leave `cached_token_stats` (`num_lmcache_extra_cached_tokens`) out of kv_transfer_params.
    """
    if not _is(seen, "no_tracker"):
        return None
    return Answer("aborted before its first lookup, and asked for statistics: there is no tracker of it")


@finding("KVD111", "load-not-granted", Severity.CRASH, on=["raised"], fixes=["KVF115"])
def load_not_granted(case: Any, seen: Any) -> Answer | None:
    """A request that vLLM computes itself was loaded all the same, and its end of load is not expected.

    Setting: no `prompt_logprobs`; the LMCache connector alone, not in a MultiConnector.
    """
    if _asserts(seen, "assert RequestStatus.is_finished(req.status)"):
        return Answer("a load was reported done of a request that waits for none", request="")
    return None


@finding("KVD112", "failed-load-keeps-tokens", Severity.CRASH, on=["raised"], fixes=["KVF008"])
def failed_load_keeps_tokens(case: Any, seen: Any) -> Answer | None:
    """A load failed, vLLM took tokens back, and the tracker kept them: what is saved has no slots."""
    if not _asserts(seen, "assert len(slot_mapping) == len(token_ids)"):
        return None
    failed = case.counts["load_failed"] + case.counts["short"]
    return Answer(f"more token ids than slots in a save; {failed} lines tell of failed loads before it", request="")


@finding("KVD113", "prompt-embeds", Severity.CRASH, on=["raised"], fixes=["KVF006"])
def prompt_embeds(case: Any, seen: Any) -> Answer | None:
    """A prompt was given as embeddings: it has no token ids to count.

    Setting: no requests with `prompt_embeds` (`--enable-prompt-embeds` off).
    """
    fields = seen.fields
    in_adapter = any(
        "lmcache" in file and function == "from_new_request" for file, _, function in fields["frames"][-2:]
    )
    if in_adapter and fields["type"] == "TypeError" and "NoneType" in fields["text"] and "len()" in fields["text"]:
        return Answer("a request without token ids was given to the connector", request="")
    return None


@finding("KVD114", "lookup-given-up-asked-again", Severity.CRASH, on=["raised"], fixes=["KVF011"])
def lookup_given_up_asked_again(case: Any, seen: Any) -> Answer | None:
    """An asynchronous lookup took too long, was given up, and the next question about it kills EngineCore.

    Setting: `enable_async_loading: false`, or a longer `lookup_timeout_ms`.
    """
    fields = seen.fields
    if fields["type"] != "KeyError" or not any("async_lookup" in frame[0] for frame in fields["frames"][-3:]):
        return None
    request = fields["text"].strip("'\"")
    return Answer(f"{case.counts['lookup_given_up']} lookups were given up before", request=request)


@finding("KVD115", "chunk-released-twice", Severity.CRASH, on=["raised"], fixes=["KVF013"])
def chunk_released_twice(case: Any, seen: Any) -> Answer | None:
    """A chunk was found that has no memory any more.

    Setting: `enable_async_loading: false`.
    """
    if _asserts(seen, "assert memory_obj.tensor is not None"):
        return Answer(
            f"a listed chunk has no tensor; double unpins before it: {case.counts['double_unpin']}", request=""
        )
    return None


@finding("KVD116", "server-silent-at-start", Severity.CRASH, on=["raised"])
def server_silent_at_start(case: Any, seen: Any) -> Answer | None:
    """A worker could not register with the LMCache server, and vLLM does not start.

    Cause: there is no server at `lmcache.mp.host` and `lmcache.mp.port`; or there is, and it does not know the
    operation, which only its own log tells (KVD206): a server does not answer what it does not know.

    Setting: start the server before vLLM, with `--supported-transfer-mode auto` and the same release of LMCache.
    """
    if not _is(seen, "server_silent"):
        return None
    server = seen.fields.get("server")
    what = f"no server at {server}" if server else f"no answer to {seen.fields.get('operation', 'a question')}"
    return Answer(f"{what}: {seen.fields['text'][:160]}", request="")


@finding("KVD199", "unknown-crash-in-connector", Severity.CRASH, on=["raised"])
def unknown_crash(case: Any, seen: Any) -> Answer | None:
    """An exception left a connector hook, and no finding knows it.

    Cause: not known to this release of kvfix. `kvfix run --mode strict -- CMD` tells which rule was broken first.
    """
    fields = seen.fields
    if fields["text"].startswith(_ECHOES) or fields["type"] in _ECHOES:
        return None
    last = fields["frames"][-1:] and fields["frames"][-1]
    if not last or not any(_of_connector(*frame) for frame in fields["frames"][-4:]):
        return None
    if not any(frame[2] in _HOOKS for frame in fields["frames"]):
        return None
    from kvfix_tools.diagnose.findings import rules

    for rule in rules()["raised"]:
        if rule.code != "KVD199" and rule.look(case, seen) is not None:
            return None
    where = f"{last[0].rpartition('/')[2]}:{last[1]} in {last[2]}"
    return Answer(f"{fields['type']} at {where}{': ' + fields['source'] if fields['source'] else ''}")


_HOOKS = {
    "create_connector",
    "ensure_kv_transfer_initialized",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished",
    "start_load_kv",
    "save_kv_layer",
    "wait_for_layer_load",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "handle_preemptions",
    "update_connector_output",
    "_update_from_kv_xfer_finished",
    "request_finished_all_groups",
    "register_kv_caches",
}


def _of_connector(file: str, line: int, function: str) -> bool:
    return "/lmcache/" in file or "kv_connector" in file or function == "_update_from_kv_xfer_finished"
