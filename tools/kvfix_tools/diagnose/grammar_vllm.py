"""Patterns of vLLM's log lines that kvfix understands, and of lines that name vLLM's release."""

from __future__ import annotations

from kvfix_tools.diagnose.messages import message as _message

#: Kinds of lines that name vLLM's release.
RELEASE_IN = ("vllm_version", "vllm_server", "vllm_environment", "vllm_image")

_message(
    "stats", "vllm", "", "Avg prompt throughput: ",
    rb"(?:Engine (?P<engine>\d+): )?Avg prompt throughput: (?P<prompt>\d+\.?\d*) tokens/s, Avg generation throughput: "
    rb"(?P<generation>\d+\.?\d*) tokens/s, Running: (?P<running>\d+) reqs, Waiting: (?P<waiting>\d+) reqs"
    rb"(?:, Deferred: (?P<deferred>\d+) reqs)?(?:, KV fetch: [^%]*? completed waiting)?"
    rb"(?:, Preemptions: (?P<preemptions>\d+))?"
    rb"(?:, \w+ KV cache usage: (?P<usage>[\d.]+)%)?(?:, Prefix cache hit rate: (?P<local>[\d.]+)%)?"
    rb"(?:, External prefix cache hit rate: (?P<external>[\d.]+)%)?",
)  # fmt: skip
_message(
    "kv_failing", "vllm", "", " due to KV load failure",
    rb"Failing (?P<objects>\d+) request\(s\) due to KV load failure \(failure_policy=fail, (?P<tokens>\d+) tokens "
    rb"affected\)(?:\. Request IDs: )?(?P<requests>.*)",
)  # fmt: skip
_message(
    "kv_recovered", "vllm", "", "Recovered from KV load failure: ",
    rb"Recovered from KV load failure: (?P<objects>\d+) request\(s\) rescheduled \((?P<tokens>\d+) tokens affected\)",
)  # fmt: skip
_message(
    "kv_waiting", "vllm", "", " is still in WAITING_FOR_REMOTE_KVS state",
    rb"<ID> is still in WAITING_FOR_REMOTE_KVS state",
)  # fmt: skip
_message(
    "broadcast", "vllm", "", "No available shared memory broadcast block found",
    rb"No available shared memory broadcast block found in (?P<seconds>\d+)",
)  # fmt: skip
# The transfers of NixlConnector and MooncakeConnector in an interval (nixl/stats.py). Other connectors log other
# numbers.
_message(
    "moved", "vllm", "", "KV Transfer metrics: ",
    rb"KV Transfer metrics: Num successful transfers=(?P<transfers>\d+), .*?Avg MB per transfer=(?P<size>[\d.]+), "
    rb"Throughput \(MB/s\)=(?P<rate>[\d.]+)",
)  # fmt: skip
# The API server or the engine has started; uvicorn answered a request with 500.
_message("up", "vllm", "", "startup complete", rb"Application startup complete")
_message("engine_up", "vllm", "", "init engine (", rb"init engine \(profile")
_message("answered_500", "vllm", "", "500 Internal", rb'" 500 Internal Server Error')
_message("fatal", "vllm", "", "EngineCore encountered a fatal error", rb"EngineCore encountered a fatal error")
_message(
    "draft_groups", "vllm", "", "KV offloading: EAGLE/MTP draft attention groups ",
    rb"KV offloading: EAGLE/MTP draft attention groups (?P<groups>[^\n]{1,200}?) detected",
)  # fmt: skip
_message(
    "vllm_version", "vllm", "", " LLM engine (v",
    rb"(?:Initializing a|Dumping input data for) V[01] LLM engine \(v(?P<vllm>[^\s)]+)\)",
)  # fmt: skip
# The API server's first line names the release. The logo may stand before it, and the last character of the logo is
# U+2588. So do the environment at the beginning of a report (collect_env) and the name of the image.
_message(
    "vllm_server", "vllm", "", " version ",
    rb"(?:vLLM (?:API )?server|\xe2\x96\x88 )\s?version (?P<vllm>\d[^\s,]*)",
)  # fmt: skip
_message("vllm_environment", "vllm", "", "vLLM Version", rb"vLLM Version\s*:\s*v?(?P<vllm>\d\S*)")
_message(
    "vllm_image", "vllm", "", "vllm/vllm-openai:v",
    rb"(?<!\w)vllm/vllm-openai:v(?P<vllm>\d+\.\d+\.\d+(?:\.post\d+|rc\d+)?)",
)  # fmt: skip
