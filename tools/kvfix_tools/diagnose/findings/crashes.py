"""Findings about EngineCore or a worker that died in a connector hook, by the text and traceback of its exception."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, finding

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import Fields, LogLine

#: Message of `assert len(slot_mapping) == len(token_ids)` in some builds of LMCache.
_DESYNC = "Slot mapping and token IDs length mismatch"
#: Calls of vLLM on the way from an abort to the connector.
_ABORTS = ("self._process_aborts_queue()", "self.abort_requests(", "self._connector_finished(")


def _asserts(line: LogLine, source: str, function: str = "") -> bool:
    """Return True for an assertion without a message, with this source, in this function (if one is given)."""
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
    """Return True if a capped load explains the mismatch, None if it may explain it."""
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


@finding
def cached_hit_promised_whole(log: Diagnosis, line: LogLine) -> Answer | None:
    if _asserts(line, "assert num_new_tokens > 0") and log.releases.within("lmcache", "==0.3.10"):
        return Answer("the whole hit was promised, so no token of the request is left to compute")
    if line.fields["meaning"] != "mismatch" or line.fields["computed"] == 0 or _capped(log, line):
        return None
    if _capped(log, line) is None:
        return Answer(
            _mismatch(line) + ". The log does not show LMCache's release: in 0.3.10 it is this finding; from 0.4.7 on, "
            "with max_tokens_per_load set, it is KVD102",
            verdict="unknown",
        )
    return Answer(_mismatch(line))


@finding
def capped_load_unaligned(log: Diagnosis, line: LogLine) -> Answer | None:
    cut = "; the load was cut to whole chunks, but the promise was not"
    return Answer(_mismatch(line) + cut) if _capped(log, line) else None


def _resumed(line: LogLine) -> str:
    f = line.fields
    return f"resumed with {f['computed']} computed tokens, but the connector expects {f['expected']}"


def _kept_back(log: Diagnosis, line: LogLine) -> Fields | None:
    """Return the last lookup of the request if its answer was `< min_retrieve`, else None."""
    known = log.requests.get(line.request)
    return known.asked if known is not None and known.asked is not None and "least" in known.asked else None


@finding
def resume_below_min_retrieve(log: Diagnosis, line: LogLine) -> Answer | None:
    asked = _kept_back(log, line)
    if asked is None:
        return None
    why = f"{asked['need']} hit tokens were not loaded, because min_retrieve is {asked['least']}"
    return Answer(f"{_resumed(line)}: {why}")


@finding
def resume_after_full_hit(log: Diagnosis, line: LogLine) -> Answer | None:
    fields = line.fields
    if _kept_back(log, line) or fields["computed"] != fields["expected"] - 1:
        return None
    return Answer(f"{_resumed(line)}: the whole prompt was hit, and vLLM computes the last token again")


@finding
def resume_with_more_than_cached(log: Diagnosis, line: LogLine) -> Answer | None:
    fields = line.fields
    more = fields["against"] == "lmcache_cached_tokens" and fields["computed"] > fields["expected"]
    return Answer(_resumed(line)) if more else None


@finding
def resume_without_grant(log: Diagnosis, line: LogLine) -> Answer | None:
    fields = line.fields
    if _kept_back(log, line) or fields["computed"] == fields["expected"] - 1:
        return None
    if fields["against"] == "lmcache_cached_tokens" and fields["computed"] > fields["expected"]:
        return None
    history = log.ledger.histories.get(line.request)
    if history is None or history.asked is None:
        sentence = f"{_resumed(line)}. The log has no lookup of this request: below min_retrieve_tokens it is KVD103"
        return Answer(sentence, verdict="unknown")
    return Answer(f"{_resumed(line)}: vLLM did not grant the promised tokens")


@finding
def abort_asserts_engine(log: Diagnosis, line: LogLine) -> Answer | None:
    if _asserts(line, "assert self.lmcache_engine is not None", "request_finished"):
        return Answer("EngineCore died when a client disconnected", request="")
    if log.who.lmcache and any(_asserts(line, call) for call in _ABORTS):  # vLLM has no assertion there
        return Answer("an assertion failed during an abort; the traceback is cut before the assertion", "", "unknown")
    return None


@finding
def transfer_of_unknown_request(log: Diagnosis, line: LogLine) -> Answer | None:
    if _asserts(line, "assert req_id in self.requests", "_update_from_kv_xfer_finished"):
        policy = ": kv_load_failure_policy `fail` ended it, `recompute` keeps it" if log.counts["kv_failing"] else ""
        return Answer(f"the connector reported a transfer of a request that vLLM had already freed{policy}", request="")
    return None


@finding
def load_not_granted(log: Diagnosis, line: LogLine) -> Answer | None:
    if not _asserts(line, "assert RequestStatus.is_finished(req.status)"):
        return None
    lmcache = any(name.startswith(("LMCache", "Multi")) for name in log.who.connectors)  # KVD659: others
    return Answer("LMCache reported a load of a request that does not wait for a load", request="") if lmcache else None


@finding
def failed_load_keeps_tokens(log: Diagnosis, line: LogLine) -> Answer | None:
    if line.fields["type"] == "AssertionError" and line.fields["text"].startswith(_DESYNC):
        return Answer("a store has more token ids than slots", request="", verdict="unknown")
    if not _asserts(line, "assert len(slot_mapping) == len(token_ids)") or "_DCP" in line.process:
        return None
    failed = log.counts["load_failed"] + log.counts["short"]
    sentence = f"a store has more token ids than slots; {failed} earlier lines report failed loads"
    return Answer(sentence, request="", verdict="violated" if failed else "unknown")


@finding
def prompt_embeds(log: Diagnosis, line: LogLine) -> Answer | None:
    fields = line.fields
    if fields["type"] != "TypeError" or "NoneType" not in fields["text"] or "len()" not in fields["text"]:
        return None
    in_adapter = any(
        "lmcache" in file and function == "from_new_request" for file, _, function in fields["frames"][-2:]
    )
    return Answer("the connector got a request without token ids", request="") if in_adapter else None


@finding
def lookup_given_up_asked_again(log: Diagnosis, line: LogLine) -> Answer | None:
    fields = line.fields
    if fields["type"] != "KeyError" or not any("async_lookup" in frame[0] for frame in fields["frames"][-3:]):
        return None
    request = fields["text"].strip("'\"")
    return Answer(f"{log.counts['lookup_given_up']} lookups timed out before the crash", request=request)


@finding
def chunk_released_twice(log: Diagnosis, line: LogLine) -> Answer | None:
    names = ("memory_obj.tensor", "memory_obj_tensor")
    if not any(_asserts(line, f"assert {name} is not None") for name in names):
        return None
    recent = log.releases.within("lmcache", ">=0.4.1")
    old = any(file.endswith("/gpu_connector.py") for file, _, _ in line.fields["frames"][-4:])  # up to 0.3.13
    if recent is False or (recent is None and old):
        return None  # with Mooncake it is KVD801
    return Answer(
        f"a listed chunk has no tensor; {log.counts['double_unpin']} chunks were unpinned twice before the crash",
        request="",
        verdict="violated" if recent else "unknown",
    )


@finding
def context_parallel_in_process(log: Diagnosis, line: LogLine) -> Answer | None:
    if "_DCP" not in line.process:
        return None
    worker = line.process.partition(" ")[0]
    if line.name == "logged":
        fails = b"Error processing request from scheduler" in line.body
        return Answer(f"{worker}: asynchronous lookups fail", request="") if fails else None
    if not _asserts(line, "assert len(slot_mapping) == len(token_ids)"):
        return None
    return Answer(f"{worker}: a store has more token ids than this rank has slots", request="")
