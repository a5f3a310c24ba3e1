"""The client of a streaming session waits for ever: vLLM preempts the session while its turn ends, and loses it.

Symptom: The log shows `Running: 0 reqs, Waiting: 0 reqs` for ever. The engine uses asynchronous scheduling.

Cause: When a turn has ended, `_handle_stopped_request` puts the session into a waiting queue for its next turn
(scheduler.py 0.32.0:2490). If the session was preempted during the step, vLLM then removes the session from the waiting
queues, like a request that has ended (:2298). In addition, when the next input comes, vLLM drops all tokens of the
session that are not computed (:1659). After a preemption, no token of the session is computed.

Fix: After `update_from_output`, the fix puts each session that is in no queue into a waiting queue. When the next input
comes, the fix keeps all tokens of the session except the last one, as 0.33.0 does (scheduler.py:1887).
- Upstream: None known. 0.33.0 first removes ended requests from the queues. Then 0.33.0 puts the sessions into a
  waiting queue (scheduler.py:2549).
"""

import inspect

from kvfix.fixes import _scheduler
from kvfix.fixes.api import GO_ON, SCHEDULER, Any, Fix, Steps, fix_after, fix_around, note, replaced

#: Attribute of a scheduler: the preempted sessions whose turn ended in this step.
_SESSIONS = "_kvfix_preempted_sessions"


@fix_around(when=lambda scheduler, request, *_, **__: request.resumable)
def _handle_stopped_request(scheduler: Any, request: Any) -> Steps:
    was_running = request in getattr(scheduler, "running", (request,))
    finished = yield
    if not finished and not was_running:
        vars(scheduler).setdefault(_SESSIONS, []).append(request)


def _enqueue(scheduler: Any, answer: Any, *_: Any, **__: Any) -> Any:
    """Put each session that is in no queue into a waiting queue. vLLM schedules only requests of its queues."""
    while sessions := getattr(scheduler, _SESSIONS, None):
        request = sessions[-1]
        queues = scheduler.waiting, scheduler.kv_holding_waiting, scheduler.running
        if request.request_id in scheduler.requests and not any(request in queue for queue in queues):
            note(__name__, f"request {request.request_id} waits for its next input")
            scheduler._enqueue_waiting_request(request)
        sessions.pop()
    return answer


_has_sessions = fix_after(when=lambda scheduler, *_, **__: getattr(scheduler, _SESSIONS, None), on_fault=_enqueue)
update_from_output = _has_sessions(_enqueue)


def _with_its_tokens(scheduler: Any, session: Any, *more: Any, **named: Any) -> Any:
    """Keep the session's earlier tokens even if the fix raises. Without these tokens, vLLM generates wrong text."""
    if session.num_computed_tokens >= session.num_tokens - 1:
        return GO_ON
    update = inspect.unwrap(type(scheduler)._update_request_as_session)
    with replaced(session, num_computed_tokens=session.num_tokens - 1):
        return update(scheduler, session, *more, **named)


@fix_around(
    when=lambda scheduler, session, *_, **__: session.num_computed_tokens < session.num_tokens - 1,
    on_fault=_with_its_tokens,
)
def _update_request_as_session(scheduler: Any, session: Any, *_: Any) -> Steps:
    with replaced(session, num_computed_tokens=session.num_tokens - 1):
        return (yield)


def shows_bug(hook: Any, module: Any) -> bool:
    """End a turn. With the bug, `_handle_stopped_request` puts the session into a queue too early."""
    _, queued = _scheduler.end_turn(hook, computed=21)
    return bool(queued)


FIX = Fix(
    SCHEDULER._handle_stopped_request(broken=">=0.32,<0.33", probe=shows_bug, fix=_handle_stopped_request, order=1),
    SCHEDULER.update_from_output(broken=">=0.32,<0.33", fix=update_from_output, order=1, helper=True),
    SCHEDULER._update_request_as_session(broken=">=0.32,<0.33", fix=_update_request_as_session, helper=True),
    effect="hang",
    no_patch={"vllm": "fixed in 0.33.0"},
)
