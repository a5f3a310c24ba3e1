"""Decode waits for minutes if the first token ends the text: MooncakeConnector does not send that prefill.

Symptom: A request whose first token is the end of the text, or a stop token, takes at least eight minutes, or fails.
The decode engine keeps its blocks, and logs `pulling kv_caches for [...] failed: Timeout waiting for P side ready.`.

Cause: In the prefill engine, request_finished sends KV only if the request ended as FINISHED_LENGTH_CAPPED. Any other
status counts as an abort (mooncake_connector.py 0.32.0:1150). vLLM checks for a stop token before it checks max_tokens
(v1/core/sched/utils.py 0.32.0:105). So a prefill with max_tokens 1 whose only token is a stop token ends as
FINISHED_STOPPED. The decode engine gets no message, and waits for VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (480 s).
NixlConnector also sends the KV of requests that ended as FINISHED_STOPPED (nixl/pull_scheduler.py 0.32.0:237).

Fix: The fix sends the KV of a stopped prefill, as MooncakeConnector does after the length limit.
- Releases: vLLM 0.20.2 to 0.33.0. 0.32.0 and 0.33.0 were tested. For the other releases, only the code was read.
- Remove when: request_finished sends the KV of a prefill that has stopped.
"""

from kvfix.fixes import _mooncake
from kvfix.fixes.api import MOONCAKE_SCHEDULER, Any, Fix, Steps, View, fix_around


@fix_around(when=lambda connector, request, *_: request.kv_transfer_params)
def fix(connector: Any, request: Any, blocks: Any) -> Steps:
    if not request.kv_transfer_params.get("do_remote_decode") or request.status.name != "FINISHED_STOPPED":
        return (yield)
    return (yield (View(request, status=type(request.status).FINISHED_LENGTH_CAPPED), blocks))


def shows_bug(hook: Any, module: Any) -> bool:
    """End a prefill by a stop token. With the bug, request_finished does not keep the blocks."""
    request = _mooncake.finished_prefill(16, module.RequestStatus.FINISHED_STOPPED)
    return not hook(_mooncake.scheduler_side("kv_producer"), request, ([1],))[0]


FIX = Fix(MOONCAKE_SCHEDULER.request_finished(broken=">=0.20", probe=shows_bug, fix=fix, order=1), effect="hang")
