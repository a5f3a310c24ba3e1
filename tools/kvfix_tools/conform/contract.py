"""The contract of a KV connector: the rules that `kvfix conform` tests.

vLLM's base class documents the methods (vllm/distributed/kv_transfer/kv_connector/v1/base.py, "base" below). Its
scheduler makes more assumptions ("sched": v1/core/sched/scheduler.py). Line numbers are those of 0.32.0.
"""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """A rule of the contract.

    codes: rules of the lab and the ledger. A violation of one of them violates this rule, in any scenario.
    proof: a count (request_events.py). If it is 0, the rule was not tested.

    Wrong content has no rule of its own. It violates the rule of the scenario, or `granted` (`_OF_CONTENT`).
    """

    slug: str
    title: str
    doc: str
    codes: tuple[str, ...] = ()
    proof: str = "loaded_tokens"


RULES = (
    Rule("promise", "A promise leaves a token to compute", """\
`get_num_new_matched_tokens` returns the number of tokens beyond the computed ones. A load within the step must leave
the last token to vLLM, because its logits give the next token. A load between steps may include the last token. vLLM
asserts on a larger promise.""",
         ("KVR001", "KVR003", "KVR005")),
    Rule("asked-again", "A lookup has no side effects", """\
vLLM asks in each step until it has blocks for the request. The same question must have the same answer (base:15)."""
         , ("LAB015", "KVR002")),
    Rule("kinds", "Answers have the types of the base class", """\
Answers are numbers, flags and sets. The flag for a load between steps is False if there is nothing to load
(base:503-511). Metadata must be picklable, because they are sent to workers in other processes.""",
         ("LAB016",), "finished"),
    Rule("scheduler-output", "The scheduler's output is not modified", """\
`build_connector_meta` must not modify the output (base:605), because the model runner computes the requests in it.""",
         ("LAB018",), "finished"),
    Rule("granted", "Exactly the granted tokens are loaded", """\
`update_state_after_alloc` gets the number of tokens that vLLM takes of a promise, which may be 0. KV of a load within
the step must be in its slots before each layer reads them. KV of a load between steps must be there before the load is
reported.""",
         ("LAB002", "KVR004", "KVR006")),
    Rule("stored", "Only computed KV is stored, under its own key", """\
A step must not store a slot that a later step computes. KV depends on all earlier tokens, the adapter and the cache
salt, so the key must contain all of them. `request.block_hashes` do."""),
    Rule("preempted", "A preempted request comes back in other blocks", """\
vLLM gives the blocks of a preempted request to other requests at once. When the request resumes, `new_block_ids` has
all of its new blocks, and vLLM asks for the request again (sched:1558-1620).""", (), "preemptions"),
    Rule("aborted", "A request may be aborted at any time", """\
An abort may come before the lookup, during the lookup, after the promise, during the load or during the computation.
The connector learns of an abort only by `request_finished`. A load in flight continues until the connector reports it,
and vLLM keeps its blocks until then (sched:2700-2708).""", (), "aborted"),
    Rule("blocks-in-use", "Blocks are read and written only while the request has them", """\
If a store continues after its step, `request_finished` must return True, or `wait_for_save` or `handle_preemptions`
must wait for the store (base:376-380). Otherwise other requests overwrite the blocks before they are copied."""),
    Rule("reported-once", "Only transfers in flight are reported as done", """\
A request is reported as sent only after `request_finished` returned True, as received only after a load between steps
was granted, and only once (base:395). Otherwise vLLM asserts, and EngineCore dies.""", ("LAB019",)),
    Rule("given-back", "All blocks become free at the end", """\
The connector reports every block that it has kept or loaded into as done, also for an aborted request.""",
         ("LAB017",)),
    Rule("failed-load", "A load that fails is reported", """\
The connector reports failed blocks (`get_block_ids_with_load_errors`, base:427-446) or requests (`failed_recving`) no
later than it reports the load as received. vLLM then computes the tokens or ends the request, as
`kv_load_failure_policy` says. KV computed on top of a failed load must not be stored.""", ("LAB005",), "loads_failed"),
    Rule("reset", "After a reset no earlier KV is found", """\
vLLM calls `reset_cache` when the weights change. vLLM takes every answer except False for success, also None
(sched:2898).""", (), "connector_resets"),
    Rule("groups", "Each KV group has its own blocks", """\
With `SupportsHMA`, a hit is the part that all groups have. A sliding window has null blocks for tokens that it does not
read any more."""),
    Rule("ahead", "A step may be scheduled before the answer to the last step", """\
With asynchronous scheduling, vLLM schedules tokens that it does not know yet. An abort or a preemption may come in
between.
"""),
    Rule("drafts", "Rejected drafts are not stored", """\
The scheduled tokens of a step include draft tokens. Only the next step shows which drafts were accepted.""",
         (), "drafts_rejected"),
    Rule("parameters", "Any kv_transfer_params of a client are survived", """\
A client may send any value. A hook that raises ends EngineCore and all of its requests.""", (), "finished"),
    Rule("raises-nothing", "No hook raises", """\
An exception that leaves a hook ends EngineCore and all of its requests.""", ("KVR011",), "finished"),
    Rule("ends", "Every request ends", """\
Every lookup gets an answer, and every load is reported as done or failed.""",
         ("LAB003", "LAB009", "KVR010"), "finished"),
    Rule("keeps-nothing", "No state of an ended request is kept", """\
Kept state is a memory leak, and confuses the next request with this id.""", ("KVR009",), "finished"),
    Rule("restart", "Stored KV is correct after a restart", """\
If the storage outlives the process, its KV must equal the KV that a new engine computes."""),
)  # fmt: skip
SLUGS = {rule.slug: rule for rule in RULES}
#: Rules about contents. Wrong KV in a scenario of another rule violates `granted`.
_OF_CONTENT = {
    "granted", "stored", "preempted", "aborted", "blocks-in-use", "failed-load", "reset", "groups", "ahead", "drafts",
    "restart",
}  # fmt: skip


def of_finding(code: str, about: str) -> str:
    """Return the rule that a finding violates. about: the rule of the scenario."""
    if code == "KVR011" and about == "parameters":  # this rule is about exceptions
        return about
    content = about if about in _OF_CONTENT else "granted"
    return next((rule.slug for rule in RULES if code in rule.codes), content)
