"""Failures in the code of connectors that their place and their kind explain. For what no other record knows."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem, Sign

#: Folders of KV code.
_KV = ("kv_connector/", "kv_offload/", "kv_transfer/", "lmcache/", "lmcache_ascend/", "nixl", "mooncake")
#: Functions that run only while an engine starts.
_START = (
    "__init__", "create_connector", "register_kv_caches", "initialize_from_config", "build_offloading_config",
    "from_vllm_config", "__post_init__",
)  # fmt: skip


def in_kv_code(kind: str, text: str = "") -> tuple[Sign, ...]:
    """Signs of this exception, raised in KV code."""
    return tuple(Failed(kind=kind, text=text, through=folder) for folder in _KV if folder.endswith("/"))


def at_the_start(kind: str) -> tuple[Sign, ...]:
    """Signs of this exception, raised while KV code starts."""
    return tuple(Failed(kind=kind, within=name, through=folder) for name in _START for folder in _KV)


PROBLEMS = (
    Problem(
        code="KVD350",
        name="router-hands-over-too-little",
        general=True,
        severity=Severity.CRASH,
        title="A request's kv_transfer_params lack what the connector needs.",
        shows=(
            Failed(kind="KeyError", source="kv_transfer_params["),
            Failed(kind="KeyError", source='params["remote'),
            Failed(kind="KeyError", text="'remote_"),
            Failed(kind="KeyError", text="'do_remote_"),
            Failed(kind="KeyError", text="'transfer_id'"),
        ),
        cause="The router (proxy) between prefill and decode makes these parameters, or passes on what prefill "
        "answered. It was written for another connector or another release of it, and does not send the key that the "
        "error names.",
        now="the proxy example of the very release of vLLM or vllm-ascend and of this connector (examples/ of that "
        "tag), in place of the router; check that decode gets the whole kv_transfer_params of prefill's answer",
        good="a router that fits this release and connector",
    ),
    Problem(
        code="KVD351",
        name="start-asserts-another-set-up",
        general=True,
        severity=Severity.CRASH,
        title="A connector asserts something of the set-up at its start that does not hold.",
        shows=at_the_start("AssertionError"),
        sure=False,
        cause="The asserted expression is the rule; its names are those of the settings or of the model's layout: "
        "sizes that must divide one another, a role, a number of ranks or of KV groups, a device, a layout.",
        now="change one of the settings that the assertion names; for groups and layouts of the model: "
        "--disable-hybrid-kv-cache-manager, the default --block-size and attention backend, no --speculative-config",
        good="a release of the connector whose documentation names this model and these options",
    ),
    Problem(
        code="KVD352",
        name="start-refuses-the-set-up",
        general=True,
        severity=Severity.CRASH,
        title="A connector refuses the set-up at its start, and the message says why.",
        shows=at_the_start("ValueError"),
        sure=False,
        cause="The code checks what it was given when it starts: options of --kv-transfer-config and of the "
        "connector's own configuration, the model's layout, the number of ranks. The message is its rule.",
        now="change what the message names; kvfix doctor -- vllm serve ... checks the rest before the next start",
        good="the set-up as the message wants it",
    ),
    Problem(
        code="KVD353",
        name="object-of-another-form",
        general=True,
        severity=Severity.CRASH,
        title="One package hands another an object of a form that this release does not take.",
        shows=(
            Failed(kind="TypeError", text="' object is not iterable"),
            Failed(kind="TypeError", text="' object is not subscriptable"),
            Failed(kind="TypeError", text="' object is not callable"),
            Failed(kind="TypeError", text="' object does not support"),
            Failed(kind="TypeError", text="' object cannot be interpreted as"),
            Failed(kind="TypeError", text="' has no len()"),
            Failed(kind="TypeError", text="unsupported operand type(s) for"),
            Failed(kind="TypeError", text="must be str, not"),
            Failed(kind="TypeError", text="unhashable type"),
            Failed(kind="TypeError", text="can only concatenate"),
            Failed(kind="TypeError", text="not supported between instances of"),
            Failed(kind="TypeError", text="cannot unpack non-iterable"),
            Failed(kind="TypeError", text="an integer is required"),
        ),
        sure=False,
        cause="The class in the message is what came, the last frame is who did not expect it. If they are of two "
        "packages, their releases do not fit. `str` or `int` is a setting in quotes or without.",
        now="pip show vllm lmcache nixl mooncake-transfer-engine, then the release of the connector's package that is "
        "of the same month as vLLM; kvfix doctor reads the installed files",
        good="a pair of releases from docs/matrix.json, or the image of the connector's authors for this vLLM",
    ),
    Problem(
        code="KVD354",
        name="copy-on-the-device-refused",
        general=True,
        severity=Severity.CRASH,
        title="The driver refused a copy between the GPU and the host.",
        shows=(
            Failed(text="MemcpyBatchAsync failed"),
            Failed(text="Memcpy2DAsync failed"),
            Failed(text="MemcpyAsync failed"),
            Failed(text="Memcpy failed"),
            Failed(text="aclrtMemcpy"),
            Failed(text="cudaErrorInvalidValue"),
        ),
        sure=False,
        cause="`invalid argument`, `invalid value`, error 1: an address or a size outside of what is allocated or "
        "registered, or a driver that does not know this call for it. Another status was left by a kernel before, and "
        "the copy only reports it.",
        now="CUDA_LAUNCH_BLOCKING=1 (HIP: AMD_SERIALIZE_KERNEL=3) at the next start: if another line fails first, "
        "that is the cause. Without the offloading (--kv-offloading-size, --kv-transfer-config) the engine runs",
        good="a driver for this CUDA or ROCm; report it with `kvfix-diagnose LOG --issue FILE.md`",
    ),
    Problem(
        code="KVD355",
        name="list-is-too-short",
        general=True,
        severity=Severity.CRASH,
        title="KV code asks a list for an entry that it does not have.",
        shows=in_kv_code("IndexError", "index out of range"),
        sure=False,
        cause="At a start: a list of the configuration (ports, hosts, devices) has fewer entries than there are "
        "ranks. In a running engine: fewer blocks, KV groups or layers than the code counts on (a hybrid model, a "
        "draft model, other sizes at the peer).",
        now="one entry for each rank in lists of ports and hosts; the same parallel sizes on prefill and decode; "
        "--disable-hybrid-kv-cache-manager, no --speculative-config: what helps says which it was",
        good="a release of the connector that lists the model's features as supported",
    ),
    Problem(
        code="KVD356",
        name="entry-is-unknown",
        general=True,
        severity=Severity.CRASH,
        title="KV code looks up an entry that is not there.",
        shows=in_kv_code("KeyError"),
        sure=False,
        cause="The key in the message says what: a request (it ended while a report was on its way), an engine id (no "
        "handshake with it, or it restarted under another), a layer (the sides have other layers), a setting (it was "
        "not given).",
        now="grep the key in the logs of both sides; request or engine: restart, then `kvfix run --mode check -- CMD` "
        "names the rule that breaks first; layer: the same model and options on both sides; setting: add it",
        good="a fix in the code that raised it: report it with `kvfix-diagnose LOG --issue FILE.md`",
    ),
    Problem(
        code="KVD357",
        name="state-asserted-otherwise",
        general=True,
        severity=Severity.CRASH,
        title="KV code found a request or a block in a state that it excludes.",
        shows=in_kv_code("AssertionError"),
        sure=False,
        cause="Two parts count differently: mostly after an abort, a preemption, a load that failed or came late, with "
        "speculative decoding, several KV groups, or two connectors. The last lines about the same request decide.",
        now="restart; `kvfix run --mode check -- CMD` names the rule that breaks first and the request's history; "
        "until then without the newest of: --speculative-config, MultiConnector, --async-scheduling",
        good="a fix in the code that raised it: report it with `kvfix-diagnose LOG --issue FILE.md`",
    ),
)
