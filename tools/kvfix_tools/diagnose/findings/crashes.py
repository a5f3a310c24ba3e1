"""Find why EngineCore or a worker died in a connector hook, from the text and traceback of the exception."""

from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.findings import Answer, Answers, decides, finding
from kvfix_tools.diagnose.log_line import LogLine

#: In some builds of LMCache, `assert len(slot_mapping) == len(token_ids)` has this message.
_DESYNC = "Slot mapping and token IDs length mismatch"
#: Source lines of the calls through which vLLM tells a connector that a request was aborted.
_ABORTS = ("self._process_aborts_queue()", "self.abort_requests(", "self._connector_finished(")


def _asserts(line: LogLine, source: str, function: str = "") -> bool:
    """Return True for an AssertionError without text at `source`, in `function` or at most two calls below it."""
    fields = line.fields
    if fields["type"] != "AssertionError" or fields["text"]:
        return False
    within = not function or any(frame[2] == function for frame in fields["frames"][-3:])
    return within and source in fields["source"]


def _capped(log: Diagnosis, line: LogLine) -> bool | None:
    """Return True if max_tokens_per_load explains the mismatch, False if another cause does, or None if unknown."""
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


@decides("cached-hit-promised-whole", "capped-load-unaligned")
def tokens_mismatch(log: Diagnosis, line: LogLine) -> Answers:
    f = line.fields
    if _asserts(line, "assert num_new_tokens > 0") and log.releases.within("lmcache", "==0.3.10"):
        what = "LMCache promised the whole hit, so vLLM has no token of the request left to compute"
        yield "cached-hit-promised-whole", Answer(what)
    if f["meaning"] != "mismatch":
        return
    promised = f"hit {f['hit']} - computed {f['computed']}{' - 1' if f['spare'] else ''}"
    sentence = f"granted {f['granted']}, but {promised} = {f['hit'] - f['computed'] - f['spare']}"
    sentence += f"; vLLM had {f['computed']} computed tokens"
    capped = _capped(log, line)
    if capped:
        cut = "; LMCache cut the load to whole chunks, but promised the tokens of the uncut load"
        yield "capped-load-unaligned", Answer(sentence + cut)
    elif f["computed"] and capped is None:
        sentence += ". The log does not show the release of LMCache. 0.3.10 has this bug. With 0.4.7 or "
        sentence += "later and max_tokens_per_load set, the cause is another bug: KVD102"
        yield "cached-hit-promised-whole", Answer(sentence, sure=False)
    elif f["computed"]:
        yield "cached-hit-promised-whole", Answer(sentence)


@decides("resume-below-min-retrieve", "resume-after-full-hit", "resume-with-more-than-cached", "resume-without-grant")
def resume_differs(log: Diagnosis, line: LogLine) -> Answers:
    f = line.fields
    resumed = f"resumed with {f['computed']} computed tokens, but the connector expects {f['expected']}"
    known = log.requests.get(line.request)
    asked = (known.asked if known is not None else None) or {}
    history = log.ledger.histories.get(line.request)
    is_more = f["against"] == "lmcache_cached_tokens" and f["computed"] > f["expected"]
    if is_more:
        yield "resume-with-more-than-cached", Answer(resumed)
    if "least" in asked:
        why = f"{asked['need']} hit tokens were not loaded, because min_retrieve is {asked['least']}"
        yield "resume-below-min-retrieve", Answer(f"{resumed}: {why}")
    elif f["computed"] == f["expected"] - 1:
        why = "the whole prompt was hit, and vLLM computes the last token again"
        yield "resume-after-full-hit", Answer(f"{resumed}: {why}")
    elif not is_more and (history is None or history.asked is None):
        why = "The log has no lookup of this request. If its hit was below min_retrieve_tokens, this crash is KVD103"
        yield "resume-without-grant", Answer(f"{resumed}. {why}", sure=False)
    elif not is_more:
        yield "resume-without-grant", Answer(f"{resumed}: vLLM did not grant the promised tokens")


@finding
def abort_asserts_engine(log: Diagnosis, line: LogLine) -> Answer | None:
    if _asserts(line, "assert self.lmcache_engine is not None", "request_finished"):
        return Answer("EngineCore died when a client disconnected", "")
    if log.who.lmcache and any(_asserts(line, call) for call in _ABORTS):  # vLLM itself has no assertion in this code
        return Answer("an assertion failed during an abort; the traceback is cut before the assertion", "", sure=False)
    return None


@decides("failed-load-keeps-tokens", "context-parallel-in-process")
def store_asserts(log: Diagnosis, line: LogLine) -> Answers:
    keeps_tokens, context_parallel = "failed-load-keeps-tokens", "context-parallel-in-process"
    worker = line.process.partition(" ")[0] if "_DCP" in line.process else ""
    if line.name == "logged":
        if worker and b"Error processing request from scheduler" in line.body:
            yield context_parallel, Answer(f"{worker}: asynchronous lookups fail", "")
    elif line.fields["type"] == "AssertionError" and line.fields["text"].startswith(_DESYNC):
        yield keeps_tokens, Answer("a store has more token ids than slots", "", sure=False)
    elif _asserts(line, "assert len(slot_mapping) == len(token_ids)"):
        if worker:
            yield context_parallel, Answer(f"{worker}: a store has more token ids than this rank has slots", "")
        else:
            failed = log.counts["load_failed"] + log.counts["short"]
            sentence = f"a store has more token ids than slots; {failed} earlier lines report failed loads"
            yield keeps_tokens, Answer(sentence, "", sure=bool(failed))


@finding
def chunk_released_twice(log: Diagnosis, line: LogLine) -> Answer | None:
    if not any(_asserts(line, f"assert {name} is not None") for name in ("memory_obj.tensor", "memory_obj_tensor")):
        return None
    recent = log.releases.within("lmcache", ">=0.4.1")
    old = any(file.endswith("/gpu_connector.py") for file, _, _ in line.fields["frames"][-4:])  # up to LMCache 0.3.13
    if recent is False or (recent is None and old):
        return None  # the cause may instead be KVD801, a failure of Mooncake
    twice = f"{log.counts['double_unpin']} chunks were unpinned twice before the crash"
    return Answer(f"a chunk that LMCache found has no tensor any more; {twice}", "", sure=bool(recent))
