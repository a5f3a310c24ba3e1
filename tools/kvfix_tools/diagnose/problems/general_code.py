"""Failures of any code that releases, settings, shapes or threads explain. For what no other record knows."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem, either

PROBLEMS = (
    Problem(
        code="KVD231",
        name="call-does-not-fit",
        general=True,
        severity=Severity.CRASH,
        title="One package calls another in a way that the installed release of that one does not take.",
        shows=(
            Failed(text="operator torchvision::nms does not exist"),
            Failed(kind="TypeError", text="got an unexpected keyword argument"),
            Failed(kind="TypeError", text="required positional argument"),
            Failed(kind="TypeError", text="required keyword-only argument"),
            Failed(kind="TypeError", text="positional arguments but"),
            Failed(kind="TypeError", text="positional argument but"),
            Failed(kind="TypeError", text="incompatible function arguments"),
            Failed(kind="TypeError", text="Can't instantiate abstract class"),
            Failed(text="cannot import name"),
            Failed(kind="AttributeError", text="module '<module>' has no attribute '"),
            Failed(kind="AttributeError", text="type object '<name>' has no attribute '"),
        ),
        cause="The two were not made for each other: vLLM, the connector's package, torch or a transport is too old "
        "or too new. It is in the code, not in a setting, if the last two frames are of different packages.",
        now="kvfix doctor -- vllm serve ... reads the installed files and names every import and argument that does "
        "not fit; then install the release that the connector's package names for this vLLM",
        good="a pair of releases from docs/matrix.json, or the image of the connector's authors for this vLLM",
        sure=False,
    ),
    Problem(
        code="KVD232",
        name="module-is-missing",
        general=True,
        severity=Severity.CRASH,
        title="A Python module that the process imports is not installed.",
        shows=either("No module named '<module>'"),
        cause="The package is missing from the environment that runs vLLM, or its release no longer has this module "
        "(a dotted name below an installed package).",
        now="python -m pip install it into the environment of vllm ($(dirname $(readlink -f $(which vllm)))/python); "
        "for a dotted name: kvfix doctor",
        good="the package in the image",
    ),
    Problem(
        code="KVD233",
        name="text-of-a-setting-cannot-be-read",
        general=True,
        severity=Severity.CRASH,
        title="JSON or YAML of a setting, a file or a request cannot be read.",
        shows=(
            Failed(kind="JSONDecodeError"),
            Failed(kind="ScannerError"),
            Failed(kind="ParserError"),
            Failed(kind="ComposerError"),
            Failed(kind="ConstructorError"),
            Failed(kind="TOMLDecodeError"),
            Logged("cannot be converted to <function json.loads"),
        ),
        cause="The text is cut, empty, or quoted for another shell: JSON wants double quotes inside and single ones "
        "around; YAML wants spaces, no tabs. Line and column of the message are those of the text. Where the last "
        "frames are of an HTTP client, the peer has answered with something else than JSON.",
        now='python -m json.tool on the JSON; --kv-transfer-config \'{"kv_connector":"...","kv_role":"kv_both"}\' '
        "in single quotes",
        good="the JSON in a file, or quoted as the shell wants it",
        sure=False,
    ),
    Problem(
        code="KVD234",
        name="setting-refused",
        general=True,
        severity=Severity.CRASH,
        title="A setting was refused; the message names it and its rule.",
        shows=(
            Failed(kind="ValidationError", text="validation error"),
            Logged("validation error for"),
            Failed(kind="ValueError", text="must be"),
            Failed(kind="ValueError", text="not supported"),
            Failed(kind="ValueError", text="is required"),
            Failed(kind="ValueError", text="must not be"),
            Failed(kind="ValueError", text="cannot be"),
            Failed(kind="ValueError", text="Unsupported"),
            Failed(kind="ValueError", text="nvalid"),
            Failed(kind="ValueError", text="Unknown"),
        ),
        cause="The code that raised checks what it was given, and says what it wants. It was given by the command "
        "line, by --kv-transfer-config or by LMCache's configuration, unless it stands in a hook of a running engine.",
        now="change the setting that the message names; kvfix doctor -- vllm serve ... checks the others before the "
        "next start",
        good="the setting in its range",
        sure=False,
    ),
    Problem(
        code="KVD235",
        name="object-was-never-made",
        general=True,
        severity=Severity.CRASH,
        title="Code uses an object that was not made, or is gone already.",
        shows=(
            Failed(kind="AttributeError", text="'NoneType' object has no attribute"),
            Failed(kind="TypeError", text="'NoneType' object is not"),
            Failed(kind="TypeError", text="'NoneType' and"),
        ),
        cause="Its start failed before this (then the log has an earlier error or warning of the same process), this "
        "role or rank does not make it, or a close ran first. The name behind `attribute` says which object.",
        now="read the same process's lines before this one, from its start: the first WARNING or ERROR there is the "
        "cause",
        good="what ends that first error",
        sure=False,
    ),
    Problem(
        code="KVD236",
        name="layer-is-unknown",
        general=True,
        severity=Severity.CRASH,
        title="A layer is asked for by a name that the other side does not have.",
        shows=(Failed(kind="KeyError", text="layers."),),
        cause="The connector registered other layers than the step uses: layers of a draft model (MTP, EAGLE), "
        "layers that share another's KV, Mamba layers, or those of another pipeline rank.",
        now="without the feature that adds the layers (--speculative-config), or with "
        "--disable-hybrid-kv-cache-manager; what helps says which it was",
        good="a release of the connector that lists the feature as supported",
        sure=False,
    ),
    Problem(
        code="KVD237",
        name="request-is-unknown",
        general=True,
        severity=Severity.CRASH,
        title="A request is asked for that this side has forgotten or never had.",
        shows=(
            Failed(kind="KeyError", text="cmpl-"),
            Failed(kind="KeyError", text="'req"),
            Failed(kind="KeyError", text="resp_"),
        ),
        cause="It ended (abort, preemption, timeout) while a report about it was on its way, or was ended twice. The "
        "lines with its id decide; `kvfix-diagnose LOG --request ID` shows them.",
        now="restart; KVFIX=observe kvfix run -- CMD records which hook came last for the request",
        good="a fix in the code that raised it: report it with `kvfix-diagnose LOG --issue FILE.md`",
        sure=False,
    ),
    Problem(
        code="KVD238",
        name="shapes-do-not-fit",
        general=True,
        severity=Severity.CRASH,
        title="KV or another tensor has another shape, size or dtype than the code expects.",
        shows=(
            Failed(kind="RuntimeError", text="is invalid for input of size"),
            Failed(kind="RuntimeError", text="The size of tensor a"),
            Failed(kind="RuntimeError", text="The expanded size of the tensor"),
            Failed(kind="RuntimeError", text="Sizes of tensors must match"),
            Failed(kind="RuntimeError", text="must match the existing size"),
            Failed(kind="RuntimeError", text="view size is not compatible"),
            Failed(kind="RuntimeError", text="shape mismatch"),
            Failed(kind="RuntimeError", text="to have dtype"),
            Failed(kind="IndexError", text="is out of bounds for dimension"),
            Failed(kind="IndexError", text="too many indices for tensor"),
            Failed(kind="ValueError", text="not enough values to unpack"),
            Failed(kind="ValueError", text="too many values to unpack"),
        ),
        cause="In a connector it means: the KV cache has a layout that this release does not know (hybrid or MLA "
        "model, other attention backend, other block size, FP8), or a chunk was stored under other settings. If it "
        "comes with an empty store too, it is the layout.",
        now="start once with an empty store (another folder, FLUSHDB, a new server). If it persists: "
        "--disable-hybrid-kv-cache-manager, --kv-cache-dtype auto, the default attention backend",
        good="a release of the connector that supports the model's layout",
        sure=False,
    ),
    Problem(
        code="KVD239",
        name="message-cannot-be-decoded",
        general=True,
        severity=Severity.CRASH,
        title="What came from another process or from a store cannot be decoded.",
        shows=(
            Failed(kind="DecodeError"),
            Failed(kind="ValidationError", text="Expected `"),
            Failed(kind="UnpicklingError"),
            Failed(kind="ExtraData"),
            Failed(kind="UnpackValueError"),
            Failed(kind="EOFError"),
            Failed(kind="UnicodeDecodeError"),
        ),
        cause="The two ends are of different releases (engine and LMCache server, prefill and decode, writer and "
        "reader of a store), the value was cut when its writer died, or something else speaks at that port.",
        now="the same image on both ends; empty the store if the value came from one",
        good="one release on both ends, and a store of its own for each release",
        sure=False,
    ),
    Problem(
        code="KVD245",
        name="threads-change-one-object",
        general=True,
        severity=Severity.CRASH,
        title="Two threads used one object at the same time.",
        shows=either(
            "dictionary changed size during iteration",
            "Set changed size during iteration",
            "deque mutated during iteration",
            "cannot close exported pointers exist",
        ),
        cause="A race in the code that raised it: it depends on load and timing, not on a setting.",
        now="restart; it comes again under load. What runs beside it, fewer of: threads, workers, concurrent requests",
        good="a fix in the code that raised it: report it with `kvfix-diagnose LOG --issue FILE.md`",
    ),
    Problem(
        code="KVD246",
        name="event-loop-ended",
        general=True,
        severity=Severity.CRASH,
        title="A coroutine is used after its event loop has ended, or from another loop.",
        shows=either("Event loop is closed", "attached to a different loop", "no running event loop"),
        cause="The process is ending, and this is a consequence; or a client was made in one thread and is used in "
        "another. An earlier error of the same process decides.",
        now="the first error of the same process before this one; if there is none, report it",
        good="what ends that first error",
        sure=False,
    ),
    Problem(
        code="KVD248",
        name="worker-of-ray-lost",
        general=True,
        severity=Severity.CRASH,
        title="Ray lost a worker; why stands in the worker's own log.",
        shows=(
            Failed(kind="RayActorError"),
            Failed(kind="ActorDiedError"),
            Failed(kind="WorkerCrashedError"),
            Failed(kind="OutOfMemoryError", text="ray"),
        ),
        cause="The process of the worker has ended: an exception, the OOM killer, a node that is gone. Ray only "
        "notices.",
        now="ray logs actor --id ID, or /tmp/ray/session_latest/logs/worker-*.err on its node; kvfix-diagnose on that",
        good="what ends the worker's own error",
        sure=False,
    ),
    Problem(
        code="KVD251",
        name="model-cannot-be-read",
        general=True,
        severity=Severity.CRASH,
        title="The model cannot be found or may not be read; no connector has part in it.",
        shows=either(
            "is not a valid model identifier",
            "Cannot access gated repo",
            "401 Client Error",
            "is not a local folder",
            "Repository Not Found",
            "trying to locate the files on the Hub",
            "outgoing traffic has been disabled",
        ),
        cause="The name is wrong, its folder is not mounted, the token does not allow it, or the machine has no "
        "network.",
        now="ls on the folder in the container; HF_TOKEN for a gated model; HF_HUB_OFFLINE=1 with a filled HF_HOME",
        good="the model on a mounted volume",
    ),
    Problem(
        code="KVD252",
        name="object-lacks-an-attribute",
        general=True,
        severity=Severity.CRASH,
        title="An object does not have what the code expects of it.",
        shows=(Failed(kind="AttributeError", text="object has no attribute '"),),
        cause="If its class is of another package than the last frame, the releases of the two do not fit. If it is "
        "of the same package, its start failed halfway, and an earlier error of this process says why.",
        now="kvfix doctor -- vllm serve ...; and the first WARNING or ERROR of this process",
        good="a pair of releases that fit, or what ends that first error",
        sure=False,
    ),
    Problem(
        code="KVD253",
        name="not-implemented-for-this",
        general=True,
        severity=Severity.CRASH,
        title="What was asked for is not implemented in this release for this connector, backend or device.",
        shows=(Failed(kind="NotImplementedError"),),
        cause="The frame names the class that lacks it: a connector without this hook, an attention backend without "
        "this layout, a device without this operation.",
        now="without the feature that leads there (the frames above the last one name it), or with the connector or "
        "backend of the examples",
        good="a release that has it",
        sure=False,
    ),
)
