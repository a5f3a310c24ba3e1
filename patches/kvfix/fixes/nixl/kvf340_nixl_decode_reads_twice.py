"""Wrong text on decode: NixlConnector lets two decode requests read one prefill's blocks, and the first one frees them.

Symptom: The decode engine logs nothing. The client gets HTTP 200 and text that does not fit the prompt. Prefill logs
`Potentially invalid KV blocks for unrecognized request ... were retrieved by a decode worker`. There are two triggers:

- A router or a client has sent a decode request again with the same kv_transfer_params.
- A request asks for several outputs (`n`). vLLM makes one request for each output.

Cause: get_num_new_matched_tokens promises prefill's tokens to every request that names remote blocks (pull_scheduler.py
0.32.0:60). Prefill frees the blocks when the first read is reported (pull_worker.py 0.32.0:688). Other requests then
use the blocks, and the second decode request reads the KV of the other requests.

Fix: In each decode engine, only the first decode request for a prefill request reads the blocks. A later request with
the same remote_engine_id and remote_request_id computes its prompt itself, and sends no notice to prefill. The fix does
not know what other decode engines have read. So a router that retries a request must send it to prefill first.
- Remove when: Prefill refuses the second read.
"""

from kvfix.fixes import _nixl, _prefills
from kvfix.fixes.api import NIXL_BASE_SCHEDULER, NIXL_PULL_SCHEDULER, NIXL_SCHEDULER, Any, Fix


def _prefill(connector: Any, params: Any) -> tuple[Any, ...] | None:
    prefill = params.get("remote_engine_id"), params.get("remote_request_id")
    pulls = getattr(connector, "_TRANSFER_MODE", "pull") == "pull"
    return prefill if pulls and None not in prefill else None


promise_once, arrive_once = _prefills.for_the_first(_prefill)


def shows_bug(hook: Any, module: Any) -> bool:
    """Look up two decode requests for one prefill request. With the bug, both decode requests get prefill's tokens."""
    return _prefills.promised_twice(hook, _nixl.scheduler_side(), **_nixl.remote_prefill(32).kv_transfer_params)


FIX = Fix(
    NIXL_SCHEDULER.get_num_new_matched_tokens(broken=">=0.20,<0.26", probe=shows_bug, fix=promise_once, order=1),
    NIXL_PULL_SCHEDULER.get_num_new_matched_tokens(broken=">=0.26", probe=shows_bug, fix=promise_once, order=1),
    NIXL_BASE_SCHEDULER.on_new_request(broken=">=0.32", fix=arrive_once, order=-1, helper=True),
    effect="wrong output",
    evidence={"KVR018": ""},
    scenarios=("nixl-lease-read-twice", "nixl-second-reader-aborted"),
    no_patch={"vllm": "prefill must refuse the second read, and this needs a change of NIXL's messages"},
)
