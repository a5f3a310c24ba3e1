"""Check prefill and decode in separate engines, and the libraries that transfer KV between machines."""

from collections.abc import Iterator

from kvfix_tools.doctor.checks import Line, check, ok, problem, remedy, unchecked
from kvfix_tools.doctor.machine import gib
from kvfix_tools.doctor.setup import TRANSFER_MODULES, Setup

_LIBRARIES = {"nixl": "nixl", "mooncake": "mooncake-transfer-engine"}  # {library: its distribution}
#: Settings that enable_p2p needs, in addition to enable_controller.
_P2P = (
    "controller_pull_url", "controller_reply_url", "lmcache_worker_ports", "p2p_host", "p2p_init_ports",
    "p2p_lookup_ports", "transfer_channel",
)  # fmt: skip
_ROLES = {"sender": "kv_producer", "receiver": "kv_consumer"}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}


@check("transfer-library")
def library(setup: Setup) -> Iterator[Line]:
    """The library with which a connector moves KV (NIXL or Mooncake) is installed and can be imported."""
    for name, dist in _LIBRARIES.items():
        if not setup.needs(name):
            continue
        package = setup.packages.get(name) or (setup.packages.get("nixl_rocm") if name == "nixl" else None)
        if package is None:
            if setup.vllm is None and setup.lmcache is None:
                yield unchecked(f"{name}, vLLM and LMCache are not installed here")
            else:
                what = f"a connector needs {name}, which is not installed for this Python"
                yield problem(what, f"pip install {dist}")
            continue
        error = setup.tried.errors.get(TRANSFER_MODULES[name])
        if error is None:
            why = setup.tried.why or "torch is not installed"
            yield unchecked(f"{package.title} is installed, but its import was not tried: {why}")
        elif error:
            wanted = "nixl-cu12 or nixl-cu13, for the CUDA of this machine" if name == "nixl" else dist
            yield problem(f"{TRANSFER_MODULES[name]} cannot be imported: {' '.join(error.split())[:300]}",
                          f"pip install {wanted}, and any library that the error names")  # fmt: skip
        else:
            yield ok(f"{package.title} can be imported")


@check("nixl-backends")
def backends(setup: Setup) -> Iterator[Line]:
    """NIXL has a plugin for each of the `backends` of NixlConnector."""
    package = setup.packages.get("nixl")
    if package is None or "NIXL_PLUGIN_DIR" in setup.environment:
        return
    files = package.folder.parent.glob("*nixl*.libs/*/libplugin_*.so")
    known = {file.stem.removeprefix("libplugin_") for file in files}
    for entry in setup.connectors:
        given = entry.extra.get("backends")
        for name in given if isinstance(given, list) and known and "Nixl" in entry.name else ():
            if name not in known:
                yield problem(f"{package.title} has no plugin for backends {name!r}", " | ".join(sorted(known)))


@check("prefill-decode")
def prefill_decode(setup: Setup) -> Iterator[Line]:
    """enable_pd has all required settings, the roles agree, and the buffer holds a chunk and --max-model-len tokens."""
    connector = setup.v1
    if connector is None or not setup.on("enable_pd"):
        return
    faults = list(_missing(setup))
    role = str(setup.setting("pd_role") or "")
    if role and role not in _ROLES:
        faults.append(problem(f"pd_role is {role!r}", "pd_role: sender (prefill), or receiver (decode)"))
    elif role and connector.role not in (_ROLES[role], "kv_both"):
        faults.append(problem(f"pd_role is {role}, but kv_role is {connector.role}", f'"kv_role": "{_ROLES[role]}"'))
    if setup.on("enable_p2p"):
        faults.append(problem("enable_pd and enable_p2p are both on", "enable_p2p: false"))
    mode = setup.setting("pd_backend_mode")
    if mode is not None and mode not in ("sync", "async"):
        faults.append(problem(f"pd_backend_mode is {mode!r}", "pd_backend_mode: async"))
    faults += _buffer(setup)
    yield from faults or [ok(f"enable_pd: {role}")]


@check("peer-to-peer")
def peer_to_peer(setup: Setup) -> Iterator[Line]:
    """enable_p2p has the controller, the ports and the channel that LMCache needs (config.py 0.5.6:744-752)."""
    if setup.v1 is None or not setup.on("enable_p2p"):
        return
    known = setup.definitions.known or _P2P
    missing = [name for name in _P2P if name in known and setup.setting(name) is None]
    if not setup.on("enable_controller"):
        missing.insert(0, "enable_controller")
    if missing:
        yield problem(f"enable_p2p needs {', '.join(missing)}", f"{remedy('KVD749')}; or enable_p2p: false")
    else:
        yield ok("enable_p2p has all settings that it needs")


def _missing(setup: Setup) -> Iterator[Line]:
    """Yield a problem for each missing setting that config.py 0.5.6:757-766 or pd_backend.py 0.5.6:124-137 requires."""
    examples = {"pd_role": "sender", "pd_buffer_size": "4294967296", "pd_buffer_device": "cuda"}
    if setup.setting("pd_role") == "receiver":
        examples.update(pd_peer_host="0.0.0.0", pd_peer_init_port="[7300]", pd_peer_alloc_port="[7400]")
    elif setup.setting("pd_role") == "sender" and not setup.on("pd_skip_proxy_notification"):
        examples.update(pd_proxy_host="HOST", pd_proxy_port="7500")
    for name, example in examples.items():
        if name in (setup.definitions.known or examples) and setup.setting(name) is None:
            yield problem(f"enable_pd needs {name}", f"{name}: {example}")


def _buffer(setup: Setup) -> Iterator[Line]:
    size, chunk = setup.number("pd_buffer_size"), setup.number("chunk_size")
    token = bytes_per_token(setup)
    if size is None or chunk is None or token is None:
        return
    longest = setup.option("max-model-len")
    wanted = int(longest) if longest.isdigit() else 0
    if size < token * chunk:
        yield problem(
            f"pd_buffer_size {gib(size)} is smaller than a chunk of {chunk:g} tokens ({gib(token * chunk)} per worker)",
            f"pd_buffer_size: {int(token * chunk) * 16}, or more",
        )
    elif size < token * wanted:
        what = f"pd_buffer_size {gib(size)} is too small for --max-model-len {wanted} ({gib(token * wanted)})"
        yield problem(what, f"pd_buffer_size: {int(token * wanted)}, or more")


def bytes_per_token(setup: Setup) -> float | None:
    """Return the KV bytes of one token in one worker, or None if config.json lacks a number that kvfix needs."""
    model = setup.model
    layers, heads = model.get("num_hidden_layers"), model.get("num_attention_heads")
    if not isinstance(layers, int) or not isinstance(heads, int) or not heads:
        return None
    asked = setup.option("dtype", "auto").removeprefix("torch.")
    named = str(model.get("torch_dtype") or model.get("dtype") or "bfloat16")
    width = 1 if "fp8" in setup.option("kv-cache-dtype") else _BYTES.get(named if asked == "auto" else asked, 2)
    here = layers / setup.parallel("pipeline")
    if isinstance(model.get("kv_lora_rank"), int):  # MLA: each rank has one latent vector for all heads
        return here * (int(model["kv_lora_rank"]) + int(model.get("qk_rope_head_dim") or 0)) * width
    kv_heads = int(model.get("num_key_value_heads") or heads)
    size = int(model.get("head_dim") or int(model.get("hidden_size") or 0) / heads)
    return 2 * here * max(kv_heads / setup.parallel("tensor"), 1) * size * width or None
