"""Check the model's KV groups, the parallel sizes, the KV layout, and LMCache's blending."""

import ast
import re
from collections.abc import Iterator

from kvfix_tools.doctor import servers
from kvfix_tools.doctor.checks import Line, check, ok, problem, remedy, unchecked
from kvfix_tools.doctor.packages import compared, constant, defined
from kvfix_tools.doctor.setup import Setup

#: Keys of config.json for models whose layers have state instead of KV: Mamba, linear attention, hybrids.
_STATE = (
    "mamba_d_state", "ssm_cfg", "mamba_d_conv", "hybrid_override_pattern", "linear_num_key_heads", "attn_layer_period",
    "layers_block_type", "ssm_state_size", "linear_attn_config", "lightning_nope",
)  # fmt: skip


@check("hybrid-model")
def hybrid(setup: Setup) -> Iterator[Line]:
    """If the model has Mamba or linear attention layers, the connector supports several KV groups."""
    lmcache = next(iter(setup.lmcache_connectors), None)
    if lmcache is None:
        return
    if not setup.model:
        what = f"the config.json of {setup.command.model or 'the model'} is not on this machine"
        yield unchecked(f"{what}, so kvfix cannot tell whether the model is hybrid")
        return
    layers = {str(each) for each in setup.model.get("layer_types") or ()}
    state = bool(layers & {"linear_attention", "mamba", "mamba2"}) or any(setup.model.get(key) for key in _STATE)
    kind = str(setup.model.get("model_type") or "this model")
    off = setup.has_option("disable-hybrid-kv-cache-manager")
    takes = not lmcache.is_v1 and _takes_groups(setup)
    # LMCache servers that define `all_null_chunk_masks` (0.5.4 and later) store null blocks of states (KVF125).
    server = setup.packages.tree("lmcache.v1.multiprocess.modules.lmcache_driven_transfer")
    if state and (off or not takes):
        why = "--disable-hybrid-kv-cache-manager is set" if off and takes else f"{lmcache.name} supports one group only"
        what = f"{kind} will not start: layers with state and layers with KV need several KV groups, but {why}"
        yield problem(what, remedy("KVD072" if off and takes else "KVD650"))
    elif state and defined(server, "all_null_chunk_masks"):
        yield unchecked(
            f"{kind} has layers with state, and kvfix cannot see the server's options. Without kvfix, the server may "
            "store states that do not exist (KVF125)",
            "kvfix run -- lmcache server --separate-object-groups ...",
        )
    elif lmcache.is_v1 and setup.has_option("no-disable-hybrid-kv-cache-manager"):
        what = f"{lmcache.name} supports one KV group, but --no-disable-hybrid-kv-cache-manager asks for several"
        yield problem(what, remedy("KVD652"))
    elif has_windows(setup) and not takes:
        keeps = f"with {lmcache.name} vLLM keeps all of their KV, which takes more memory"
        yield ok(f"{kind} has sliding-window layers: {keeps}")
    else:
        yield ok(f"{lmcache.name} supports the KV groups of {kind}")


def has_windows(setup: Setup) -> bool:
    """Return True if some layers of the model attend only to a part of the tokens, and other layers to all tokens."""
    layers = {str(each) for each in setup.model.get("layer_types") or ()}
    return bool(layers & {"sliding_attention", "chunked_attention"}) and len(layers) > 1


def _takes_groups(setup: Setup) -> bool:
    """Return True if LMCache's multi-process connector supports several KV groups (inherits vLLM's SupportsHMA)."""
    node = defined(setup.packages.tree("lmcache.integration.vllm.lmcache_mp_connector"), "LMCacheMPConnector")
    bases = [ast.unparse(each) for each in node.bases] if isinstance(node, ast.ClassDef) else []
    return "SupportsHMA" in bases and not setup.environment.get("LMCACHE_USE_UPSTREAM_MP")


@check("parallel")
def parallel(setup: Setup) -> Iterator[Line]:
    """The tensor, pipeline, data and decode context parallel sizes fit the model, the servers and the port lists."""
    if not setup.connectors:
        return
    faults = []
    tensor, context = setup.parallel("tensor"), setup.parallel("decode-context")
    if tensor % context:
        divisor = max(size for size in range(1, context + 1) if not tensor % size)
        what = f"--decode-context-parallel-size {context} does not divide --tensor-parallel-size {tensor}"
        faults.append(problem(what, f"--decode-context-parallel-size {divisor}"))
    heads = setup.model.get("num_attention_heads")
    if isinstance(heads, int) and heads % tensor:
        divisor = max(size for size in range(1, tensor) if not heads % size)
        what = f"{heads} attention heads cannot be divided by --tensor-parallel-size {tensor}"
        faults.append(problem(what, f"--tensor-parallel-size {divisor}"))
    faults += [*_context(setup, context), *_servers(setup), *_ports(setup)]
    yield from faults or [ok(f"{setup.ranks} workers (tensor {tensor}, pipeline {setup.parallel('pipeline')})")]


def _context(setup: Setup, context: int) -> Iterator[Line]:
    """Check decode context parallelism. Connectors without support store nothing (vllm_v1_adapter.py 0.5.6:1159)."""
    for connector in setup.lmcache_connectors if context > 1 and setup.lmcache else ():
        module = "vllm_v1_adapter" if connector.is_v1 else "lmcache_mp_connector"
        is_copy = connector.is_mp and setup.environment.get("LMCACHE_USE_UPSTREAM_MP")
        source = "" if is_copy else setup.packages.text(f"lmcache.integration.vllm.{module}")
        if "decode_context_parallel_size" not in source:
            yield problem(
                f"the installed {connector.name} does not support --decode-context-parallel-size {context}: it stores "
                "nothing",
                '--decode-context-parallel-size 1, or "kv_connector": "LMCacheMPConnector" with LMCache 0.5.5 or later',
            )


def _servers(setup: Setup) -> Iterator[Line]:
    """Check a list of servers as LMCacheMPConnector does when it starts (lmcache_mp_connector.py 0.5.6:656-705)."""
    count = len(servers.addresses(setup.mp)) if setup.mp else 1
    if count < 2:
        return
    if setup.ranks % count:
        what = f"{setup.ranks} workers cannot be shared equally by {count} LMCache servers"
        yield problem(what, "lmcache.mp.server_urls: a number of servers that divides the number of workers")
    for which in ("pipeline", "data"):
        if setup.parallel(which) > 1:
            what = f"several LMCache servers do not work with --{which}-parallel-size {setup.parallel(which)}"
            yield problem(what, f"lmcache.mp.server_urls: one server, or --{which}-parallel-size 1")
    if setup.ranks // count < setup.parallel("decode-context"):
        what = "each LMCache server has fewer workers than --decode-context-parallel-size"
        yield problem(what, "lmcache.mp.server_urls: fewer servers")


def _ports(setup: Setup) -> Iterator[Line]:
    """Check that each list of ports has a port for each worker. Worker N takes item N (pd_backend.py 0.5.6:146)."""
    if setup.v1 is None:
        return
    uses = {
        "enable_pd": ("pd_peer_init_port", "pd_peer_alloc_port"),
        "enable_p2p": ("p2p_init_ports", "p2p_lookup_ports"),
        "enable_controller": ("lmcache_worker_ports",),
    }
    for switch, names in uses.items():
        for name in names if setup.on(switch) else ():
            ports = setup.several(name)
            if setup.setting(name) is not None and len(ports) < setup.parallel("tensor"):
                first = int(ports[0]) if ports and str(ports[0]).strip().isdigit() else 7300
                wanted = ", ".join(str(first + rank) for rank in range(setup.parallel("tensor")))
                what = f"{name} has {len(ports)} ports for {setup.parallel('tensor')} workers"
                yield problem(what, f"{name}: [{wanted}]")


@check("layout")
def layout(setup: Setup) -> Iterator[Line]:
    """VLLM_KV_CACHE_LAYOUT is a layout that vLLM has and LMCache supports."""
    wanted = setup.environment.get("VLLM_KV_CACHE_LAYOUT", "")
    if not wanted:
        return
    pattern = r'env_with_choices\(\s*"VLLM_KV_CACHE_LAYOUT",\s*None,\s*(\[[^\]]*\])'
    found = re.search(pattern, setup.packages.text("vllm.envs"))
    choices = list(ast.literal_eval(found[1])) if found else []
    tree = setup.packages.tree("lmcache.integration.vllm.utils") if setup.lmcache_connectors else None
    function = defined(tree, "translate_vllm_kv_cache_layout")
    table = next((node for node in ast.walk(function) if isinstance(node, ast.Dict)), None) if function else None
    moves = [str(constant(key)) for key in table.keys] if table else []
    if choices and wanted not in choices:
        what = f"VLLM_KV_CACHE_LAYOUT={wanted}: this vLLM has only {', '.join(choices)}"
        yield problem(what, "unset VLLM_KV_CACHE_LAYOUT")
    elif moves and wanted not in moves:
        yield problem(f"LMCache cannot move KV in the layout {wanted}", remedy("KVD779"))
    elif choices:
        yield ok(f"VLLM_KV_CACHE_LAYOUT={wanted}")
    else:
        yield unchecked(f"VLLM_KV_CACHE_LAYOUT={wanted}: the layouts of this vLLM are unknown")


@check("blending")
def blending(setup: Setup) -> Iterator[Line]:
    """With enable_blending, gpu_worker.py registers the model with VLLMModelTracker, and LMCache supports the model."""
    if setup.v1 is None or not setup.on("enable_blending"):
        return
    worker = setup.packages.text("vllm.v1.worker.gpu_worker")
    tree = setup.packages.tree("lmcache.v1.compute.models.utils")
    if not worker or tree is None:
        yield unchecked("enable_blending: vLLM or LMCache is not installed here")
        return
    models = [str(constant(each.comparators[0])) for each in compared(defined(tree, "infer_model_from_vllm"))]
    architecture = next(iter(setup.model.get("architectures") or ()), "")
    faults = []
    if "VLLMModelTracker" not in worker:
        what = "enable_blending: vLLM's gpu_worker.py does not register the model with VLLMModelTracker"
        faults.append(problem(what, remedy("KVD746")))
    if models and architecture and architecture not in models:
        faults.append(problem(f"enable_blending: LMCache supports {', '.join(models)}, not {architecture}",
                              "enable_blending: false"))  # fmt: skip
    yield from faults or [ok(f"enable_blending: {architecture or 'the model is unknown'}")]
