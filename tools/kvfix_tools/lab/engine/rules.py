"""Rules that only the lab can check, because it has the slots, the requests and the server.

The rules of the ledger (KVR) are in kvfix.ledger.rules.
"""

from typing import NamedTuple


class LabRule(NamedTuple):
    """A rule. code, name, doc: for users."""

    code: str
    name: str
    doc: str


RULES = (
    LabRule("LAB001", "wrong-content", """\
Each slot that a step reads, and each stored chunk, holds the KV of the right token.

A slot of the lab holds the hash of all tokens up to its own token. So the lab finds a load into a wrong slot, a stale
block, and KV of another prompt, tenant or adapter. An engine generates wrong text from it."""),
    LabRule("LAB002", "load-came-short", """\
A load brings all promised tokens, unless the schedule makes it fail.

vLLM computes missing tokens again, or ends the request with an error (`kv_load_failure_policy`)."""),
    LabRule("LAB003", "never-ends", """\
Every request ends after many steps with free blocks. Otherwise its client waits for ever."""),
    LabRule("LAB004", "not-stored", """\
The cache has each whole chunk of a computed prompt, if the scenario expects it."""),
    LabRule("LAB005", "harmed-by-others", """\
A request without a failed load ends with an answer, not with an error."""),
    LabRule("LAB006", "not-found", """\
A lookup finds the cached chunks, if the scenario expects it."""),
    LabRule("LAB007", "fault-of-kvfix", """\
kvfix itself has no error.

An engine logs the error once and continues without the fix. In the lab the error is a violation."""),
    LabRule("LAB008", "wrong-text", """\
The model samples each token of an answer from the right tokens before it.

In the lab a sampled token is a function of all tokens before it. A step that has read wrong KV samples another
token."""),
    LabRule("LAB009", "no-request-can-move", """\
If requests wait, a request runs, a transfer or lookup is in flight, or the first waiting request has enough blocks.

vLLM admits its waiting requests in order and stops at the first one that it has no blocks for. If nothing runs and
nothing is in flight, no block ever becomes free (kvfix.ledger.liveness)."""),
    LabRule("LAB010", "stored-against-policy", """\
No request is stored that must not be stored.

A kv_consumer stores nothing. A request must not be stored if it asks LMCache for `lmcache.skip_save` and names no
decoder,
or OffloadingConnector for `max_offload_tokens` 0."""),
    LabRule("LAB015", "answer-changes", """\
A second call of `get_num_new_matched_tokens` returns the same answer: the hook has no side effects.

vLLM asks in each step until it has blocks for the request ("might be called multiple times for a given request and
should be side-effect free", vllm/distributed/kv_transfer/kv_connector/v1/base.py 0.32.0:15)."""),
    LabRule("LAB016", "wrong-kind-of-answer", """\
Each hook returns the type that the base class documents, and metadata can be pickled.

`get_num_new_matched_tokens` returns a number of tokens or None, and a flag that is False if there is no load
(v1/base.py 0.32.0:503-511). `request_finished` returns a flag, and a dict or None. vLLM sends metadata to workers in
other processes by pickle."""),
    LabRule("LAB017", "blocks-never-given-back", """\
Blocks that vLLM keeps for the connector at a request's end become free: the transfer is reported as done.

vLLM keeps the blocks if `request_finished` returns True, or if a load runs when the request is aborted. vLLM frees them
when the worker reports the request as sent or received (scheduler.py 0.32.0:3209). Otherwise the engine runs out of
blocks."""),
    LabRule("LAB018", "changes-what-is-not-its-own", """\
`build_connector_meta` does not change the scheduler's output (v1/base.py 0.32.0:605-611).

The model runner computes the tokens of this output."""),
    LabRule("LAB019", "nothing-was-in-flight", """\
A request is reported as sent or received once, and only after such a transfer.

A request is sent after `request_finished` has returned True, and received after vLLM has granted a load between steps.
At any other report vLLM asserts and EngineCore dies, or vLLM frees blocks in use (scheduler.py 0.32.0:3222-3235)."""),
    LabRule("LAB020", "blocks-held", """\
All blocks of two engines are free when all their requests and leases have ended."""),
    LabRule("LAB021", "thread-died", """\
A thread that answers another engine does not end. Otherwise requests to it are never answered, without an error."""),
    LabRule("LAB022", "kept-of-peer", """\
Neither of two engines keeps state of the other one when all requests and leases have ended."""),
    LabRule("LAB025", "coroutine-raised", """\
No coroutine raises while no code waits for it. Otherwise its work is not done, without an error."""),
    LabRule("LAB026", "awaited-in-vain", """\
No decode request waits, until a timeout, for a prefill that has ended or was aborted and will not be sent."""),
    LabRule("LAB027", "differs-from-model", """\
With `--transfers real` NIXL and the lab's model give the same events, statuses, tokens and contents in each step.

If they differ, findings with the model may not be true for an engine."""),
    LabRule("LAB028", "memory-held", """\
All blocks of GPU and CPU memory are free when all requests have ended and no copy is in flight.

Hits, loads and stores hold blocks. The engine loses a block that is held for another reason."""),
    LabRule("LAB029", "never-rests", """\
Many steps after the end of all requests, an offloading connector has ended its copies, and the engine rests.

Otherwise the engine makes steps and copies for ever."""),
)  # fmt: skip
(
    WRONG_CONTENT, LOAD_CAME_SHORT, NEVER_ENDS, NOT_STORED, HARMED_BY_OTHERS, NOT_FOUND, FAULT_OF_KVFIX, WRONG_TEXT,
    NO_REQUEST_CAN_MOVE, STORED_AGAINST_POLICY, ASKED_AGAIN, WRONG_KIND, NEVER_GIVEN_BACK, NOT_ITS_TO_CHANGE,
    NOT_IN_FLIGHT, BLOCKS_HELD, THREAD_DIED, KEPT_OF_PEER, COROUTINE_RAISED,
    AWAITED_IN_VAIN, DIFFERS_FROM_MODEL, MEMORY_HELD, NEVER_RESTS,
) = RULES  # fmt: skip
