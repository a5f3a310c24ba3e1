"""Rules that only the lab can check: it has the slots, the requests and the server. LAB007 is about kvfix itself.

The rules of the ledger (KVR) are in kvfix.ledger.rules; of both a `Finding` has code and name.
"""

from __future__ import annotations

from typing import NamedTuple


class LabRule(NamedTuple):
    """`code` and `name` are for users; `doc` explains it."""

    code: str
    name: str
    doc: str


RULES = (
    LabRule("LAB001", "wrong-content", """\
Each slot that a step reads holds the KV of the token that belongs there, and so does each chunk that is stored.

A slot of the lab holds the hash of all tokens up to the one whose KV it stands for: a load into the wrong slot, a
stale block, KV of another prompt, tenant or adapter is found where it is read. In an engine it is wrong text."""),
    LabRule("LAB002", "load-came-short", """\
A load brings all tokens that were promised, but where the schedule makes it fail.

What it does not bring vLLM computes again, or ends the request with an error (`kv_load_failure_policy`)."""),
    LabRule("LAB003", "never-ends", """\
Every request ends, once all blocks are free and many steps were made: else its client waits for ever."""),
    LabRule("LAB004", "not-stored", """\
Each whole chunk of a prompt that was computed is in the cache afterwards, where the scenario expects it."""),
    LabRule("LAB005", "harmed-by-others", """\
A request none of whose own loads has failed ends with an answer, not with an error."""),
    LabRule("LAB006", "not-found", """\
A lookup finds what is in the cache, where the scenario expects it."""),
    LabRule("LAB007", "fault-of-kvfix", """\
Nothing goes wrong in kvfix itself.

An engine goes on without the fix and logs it once; in the lab it is a violation, so that it is noticed."""),
    LabRule("LAB008", "wrong-text", """\
Each token of an answer is the one that the model samples after the tokens before it.

A token sampled in the lab is a function of all tokens before it, and another one where the step has read wrong KV."""),
    LabRule("LAB009", "no-request-can-move", """\
Where requests wait, something runs, is in flight or is owed; or the first of them has the blocks that it needs.

vLLM asks its waiting requests in order and stops at the first one that it has no blocks for. If nothing runs and
nothing is in flight, no block ever comes free (kvfix.ledger.liveness)."""),
    LabRule("LAB010", "stored-against-policy", """\
Nothing is stored that is not to be.

That is by a kv_consumer, and of a request that asks LMCache for `lmcache.skip_save` and names no decoder, or the
OffloadingConnector for `max_offload_tokens` 0."""),
    LabRule("LAB015", "answer-changes", """\
`get_num_new_matched_tokens` answers the same where it is asked again at once: a question changes nothing.

vLLM asks in each step until it has blocks for the request ("might be called multiple times for a given request and
should be side-effect free", vllm/distributed/kv_transfer/kv_connector/v1/base.py 0.32.0:15)."""),
    LabRule("LAB016", "wrong-kind-of-answer", """\
Each hook answers what the base class says, in kind: numbers, flags, sets; and metadata that can be pickled.

A number of tokens or None, with a flag that is False where nothing is to be loaded (v1/base.py 0.32.0:503-511); from
`request_finished` a flag and a dict or None; metadata reach workers in other processes by pickle."""),
    LabRule("LAB017", "blocks-never-given-back", """\
Blocks that vLLM keeps for the connector at a request's end come free: the transfer is reported as done.

`request_finished` has said True, or a load ran when the request was aborted. vLLM frees them when the worker's role
reports the request as sent, or as received (scheduler.py 0.32.0:3209). Else the engine runs out of blocks."""),
    LabRule("LAB018", "changes-what-is-not-its-own", """\
`build_connector_meta` leaves the scheduler's output as it is (v1/base.py 0.32.0:605-611).

The model runner computes what is in it."""),
    LabRule("LAB019", "nothing-was-in-flight", """\
A request is reported as sent, or as received, once, and only if it was to be.

As sent: after `request_finished` has said True. As received: after a load between steps was granted. On anything else
vLLM asserts, and EngineCore dies; or it frees blocks that are in use (scheduler.py 0.32.0:3222-3235)."""),
    LabRule("LAB020", "blocks-held", """\
All requests of two engines have ended, and all leases between them: then all blocks are free."""),
    LabRule("LAB021", "thread-died", """\
A thread of an engine that answers others goes on: what they ask for is else never answered, and nothing says so."""),
    LabRule("LAB022", "kept-of-peer", """\
All requests of two engines have ended, and all leases between them: then neither keeps anything of the other's."""),
    LabRule("LAB025", "coroutine-raised", """\
No coroutine of an engine that nobody waits for raises: what it was to do is left undone, and nothing says so."""),
    LabRule("LAB026", "awaited-in-vain", """\
No decode request waits for a prefill that has ended, or was aborted, and is not sent: it would until a timeout."""),
    LabRule("LAB027", "differs-from-model", """\
With `--transfers real` NIXL does what the lab's model of it does: events, statuses, tokens and contents, step by step.

If it does not, what the lab finds with the model may not be so in an engine."""),
    LabRule("LAB028", "memory-held", """\
All requests have ended, and no copy is in flight: then all blocks are free, those of the connector's CPU memory too.

A hit, a load and a store hold the blocks that they are about. What is held by none of them is lost to the engine."""),
    LabRule("LAB029", "never-rests", """\
All requests ended many steps ago: then a connector that offloads has copied what it is to copy, and the engine rests.

Else it makes steps and copies for ever: time, power, and a cache whose contents go round."""),
)  # fmt: skip
(
    WRONG_CONTENT, LOAD_CAME_SHORT, NEVER_ENDS, NOT_STORED, HARMED_BY_OTHERS, NOT_FOUND, FAULT_OF_KVFIX, WRONG_TEXT,
    NO_REQUEST_CAN_MOVE, STORED_AGAINST_POLICY, ASKED_AGAIN, WRONG_KIND, NEVER_GIVEN_BACK, NOT_ITS_TO_CHANGE,
    NOT_IN_FLIGHT, BLOCKS_HELD, THREAD_DIED, KEPT_OF_PEER, COROUTINE_RAISED,
    AWAITED_IN_VAIN, DIFFERS_FROM_MODEL, MEMORY_HELD, NEVER_RESTS,
) = RULES  # fmt: skip
