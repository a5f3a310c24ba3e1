"""What a connector must keep: the rules by which `kvfix conform` gives its verdicts, and how a violation is known.

vLLM's base class says what to implement (vllm/distributed/kv_transfer/kv_connector/v1/base.py, "base" below); what must
hold besides, its scheduler assumes ("sched": v1/core/sched/scheduler.py). Lines are those of 0.32.0.
"""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """`codes`: of the lab's and the ledger's rules; a violation of one is a violation of this, in any scenario.

    Wrong content has no rule of its own: it belongs to the rule that the scenario is about. proof: the count
    (request_events.py) without which nothing was tested of it.
    """

    slug: str
    title: str
    doc: str
    codes: tuple[str, ...] = ()
    proof: str = "loaded_tokens"


RULES = (
    Rule("promise", "A promise leaves a token to compute", """\
`get_num_new_matched_tokens` counts tokens beyond the computed ones, which it gets. A load within the step leaves the
last token: its logits give the next one. A load between steps may have it too. vLLM asserts on a larger promise.""",
         ("KVR001", "KVR003", "KVR005")),
    Rule("asked-again", "A question changes nothing", """\
vLLM asks in each step until it has blocks for the request: the same question has the same answer (base:15)."""
         , ("LAB015", "KVR002")),
    Rule("kinds", "Answers are what the base class says", """\
In kind: numbers, flags, sets. The flag for a load between steps is False where nothing is to be loaded (base:503-511).
Metadata reach workers in other processes by pickle.""", ("LAB016",), "finished"),
    Rule("scheduler-output", "The scheduler's output stays as it is", """\
`build_connector_meta` should not modify it (base:605): the model runner computes what is in it.""",
         ("LAB018",), "finished"),
    Rule("granted", "What is granted is loaded, and nothing else", """\
`update_state_after_alloc` says how many tokens vLLM takes of a promise; 0 is none, whatever was promised. A load within
the step is in its slots before each layer reads them, in all layers; one between steps, before it is reported.""",
         ("LAB002", "KVR004", "KVR006")),
    Rule("stored", "Only what is computed is stored, under its own key", """\
A step stores no slot that a later one computes. KV belongs to all tokens before it, to the adapter and to the salt:
what is stored for one is not loaded for another. (`request.block_hashes` have all of that.)"""),
    Rule("preempted", "A preempted request comes back in other blocks", """\
Its blocks are others' at once. When it is resumed, `new_block_ids` has all of its new ones, and it is asked for again
(sched:1558-1620).""", (), "preemptions"),
    Rule("aborted", "A request may be aborted at any time", """\
Before it is asked for, before its lookup is answered, after the promise, while it loads, while it computes:
`request_finished` is all that the connector hears. A load that runs goes on until it is reported; vLLM keeps its blocks
for it (sched:2700-2708).""", (), "aborted"),
    Rule("blocks-in-use", "Blocks are read and written only while they are the request's", """\
A store that goes on after its step says so at the request's end (`request_finished` returns True), or waits for it in
`wait_for_save` or `handle_preemptions` (base:376-380). Else others write to the blocks first."""),
    Rule("reported-once", "What is reported as done was in flight", """\
As sent: after `request_finished` returned True. As received: after a load between steps was granted. Once (base:395).
On anything else vLLM asserts, and EngineCore dies.""", ("LAB019",)),
    Rule("given-back", "Blocks come free at the end", """\
What the connector has kept, or loads into, it reports as done, also of an aborted request.""", ("LAB017",)),
    Rule("failed-load", "A load that fails is reported", """\
By block (`get_block_ids_with_load_errors`, base:427-446) or by request (`failed_recving`), not later than the load is
reported as received: vLLM computes it again, or ends the request, as `kv_load_failure_policy` says. What is computed on
top of it meanwhile is not stored.""", ("LAB005",), "loads_failed"),
    Rule("reset", "After a reset nothing of before is found", """\
`reset_cache` is called when the weights change. Anything but False counts as done, None too (sched:2898).""",
         (), "connector_resets"),
    Rule("groups", "Each KV group has its own blocks", """\
With `SupportsHMA`: a hit is what all groups have; a sliding window has null blocks where nothing is read any more."""),
    Rule("ahead", "A step may be scheduled before the answer to the last one", """\
With asynchronous scheduling tokens are scheduled that are not known yet, and an abort or a preemption comes in between.
"""),
    Rule("drafts", "Rejected drafts are not stored", """\
The scheduled tokens of a step have its drafts in them; which of them are accepted, the next step shows.""",
         (), "drafts_rejected"),
    Rule("parameters", "kv_transfer_params come from a client", """\
Whatever is in them, EngineCore lives on: a hook that raises ends it, with all of its requests.""", (), "finished"),
    Rule("raises-nothing", "No hook raises", """\
An exception that leaves a hook ends EngineCore, with all of its requests.""", ("KVR011",), "finished"),
    Rule("ends", "Every request ends", """\
A lookup is answered some time, a load is reported as done or as failed.""",
         ("LAB003", "LAB009", "KVR010"), "finished"),
    Rule("keeps-nothing", "Nothing is kept of a request that has ended", """\
Else it is memory that grows, and the state of the next request with this id.""", ("KVR009",), "finished"),
    Rule("restart", "What outlives the engine is right afterwards", """\
Where the storage outlives the process, what it has is what a new engine would compute."""),
)  # fmt: skip
SLUGS = {rule.slug: rule for rule in RULES}
#: Rules that are about contents: wrong KV in a scenario of theirs is a violation of them, in another one of `granted`.
_OF_CONTENT = {
    "granted", "stored", "preempted", "aborted", "blocks-in-use", "failed-load", "reset", "groups", "ahead", "drafts",
    "restart",
}  # fmt: skip


def of_finding(code: str, about: str) -> str:
    """The rule that a finding violates. about: the rule of the scenario that was played."""
    if code == "KVR011" and about == "parameters":  # that no exception comes of them is what it is about
        return about
    content = about if about in _OF_CONTENT else "granted"
    return next((rule.slug for rule in RULES if code in rule.codes), content)
