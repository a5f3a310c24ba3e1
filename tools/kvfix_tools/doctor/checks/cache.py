"""Check settings on which cache hits depend: chunk size, hashes, and the transfer mode of the multi-process server."""

import sys
from collections.abc import Iterator

from kvfix_tools.doctor.checks import Line, check, ok, problem, unchecked
from kvfix_tools.doctor.setup import Setup

_BLOCKS = (16, 32, 64, 128)  # vLLM's block sizes in tokens. Some attention backends use 32, 64 or 128


@check("chunk-size")
def chunk_size(setup: Setup) -> Iterator[Line]:
    """LMCache's chunk size is a multiple of vLLM's block size times the decode context parallel size."""
    sizes: dict[str, object] = {}
    if setup.v1:
        sizes["chunk_size"] = setup.setting("chunk_size")
    for server in setup.servers:
        sizes["--chunk-size of the LMCache server"] = server.options.get("chunk_size", 256 if server.options else None)
    if setup.command.program.startswith("lmcache"):
        sizes["--chunk-size"] = setup.option("chunk-size", "256")
    given = setup.option("block-size")
    share = setup.parallel("decode-context")
    times = f" times {share} ranks" if share > 1 else ""
    for name, value in sizes.items():
        chunk = int(str(value)) if str(value).isdigit() else 0
        if not chunk:
            yield unchecked(f"{name} is unknown, so it was not compared with vLLM's block size")
        elif given.isdigit() and chunk % (int(given) * share):
            block = int(given) * share
            do = f"{name.partition(' of ')[0]} {max(round(chunk / block), 1) * block}, a multiple of {block}"
            yield problem(f"{name} {chunk} is not a multiple of vLLM's block size {given}{times}", do)
        elif not given.isdigit() and chunk % (_BLOCKS[0] * share):
            what = f"{name} {chunk} is not a multiple of {_BLOCKS[0] * share}, so no block size of vLLM fits"
            do = f"{name.partition(' of ')[0]} N, with N a multiple of {_BLOCKS[-1] * share} (default 256)"
            yield problem(what, do)
        elif given.isdigit() or not chunk % (_BLOCKS[-1] * share):
            yield ok(f"{name} {chunk} is a multiple of vLLM's block size{f' {given}' if given else ''}")
        else:
            yield unchecked(f"{name} {chunk} is a multiple of 16, but vLLM's block size is unknown", "--block-size N")


@check("load-cap")
def load_cap(setup: Setup) -> Iterator[Line]:
    """lmcache.max_tokens_per_load is at least one chunk, if it is set. A smaller value disables all loads."""
    cap = str(setup.v1.extra.get("lmcache.max_tokens_per_load", "")) if setup.v1 else ""
    chunk = setup.number("chunk_size")
    if cap.isdigit() and chunk and 0 < int(cap) < chunk:
        what = f"lmcache.max_tokens_per_load {cap} is less than chunk_size {chunk:g}: nothing is ever loaded"
        yield problem(what, f'"lmcache.max_tokens_per_load": {int(chunk)}, or more, or 0 for no limit')


@check("hash-seed")
def hash_seed(setup: Setup) -> Iterator[Line]:
    """All processes that share a cache compute equal keys, because PYTHONHASHSEED is set or the hash needs no seed."""
    seed = setup.environment.get("PYTHONHASHSEED", "random")
    if setup.v1:
        algorithm, how = str(setup.setting("pre_caching_hash_algorithm") or "builtin"), "pre_caching_hash_algorithm"
        shared = _shared(setup)
    elif setup.is_server:
        algorithm, how = setup.option("hash-algorithm"), "--hash-algorithm"
        shared = ["other servers, or this server after a restart"] if algorithm == "builtin" else []
    else:
        return
    no_bytes = _no_bytes(setup)
    if algorithm.startswith("sha256") and how.startswith("pre") and no_bytes:
        until = "" if _hashes_none(setup) else f", or set {how}: builtin and PYTHONHASHSEED=0"
        do = f'pip install "lmcache>=0.4.6"{until}'
        yield problem(f"{how} is {algorithm}, whose hashes are bytes, but {no_bytes}", do)
        return
    if algorithm != "builtin":
        yield ok(f"every process computes the same keys, with {algorithm or 'the default hash'}")
        return
    fixed = seed.isdigit()
    none_too = fixed and setup.v1 is not None and _hashes_none(setup)
    remedy = "PYTHONHASHSEED=0 in the environment of every process"
    if none_too and no_bytes:
        remedy = 'pip install "lmcache>=0.4.6", or use Python 3.12'
    elif how.startswith("pre") and not no_bytes:
        stable = f"{how}: sha256_cbor (LMCACHE_PRE_CACHING_HASH_ALGORITHM=sha256_cbor)"
        remedy = f"{stable}, which gives the same keys in every process" if none_too else f"{remedy}, or {stable}"
    if not shared:
        yield ok("keys are computed with Python's own hash, and no other process shares this cache")
    elif none_too:
        what = f"LMCache hashes None, and the hash of None differs in each process, so {shared[0]} will find no chunk"
        yield problem(what, remedy)
    elif not fixed:
        yield problem(
            f"PYTHONHASHSEED is {seed!r} and {how} is builtin: keys differ in every process, so no chunk is found by "
            f"{', '.join(shared)}",
            f"{remedy}; kvfix explain KVF901",
        )
    else:
        yield ok(f"PYTHONHASHSEED is {seed}. Every process that shares the cache needs this value")


def _shared(setup: Setup) -> list[str]:
    """Return texts that name the processes which must compute equal keys."""
    found = []
    if setup.ranks > 1 or setup.option("distributed-executor-backend") in ("mp", "ray"):
        found.append(f"the {setup.ranks} workers and the scheduler" if setup.ranks > 1 else "the worker")
    if setup.parallel("data") > 1:
        found.append("the other engines (data parallel)")
    places = {"remote_url": "engines that share remote_url", "local_disk": "this engine after a restart (local_disk)"}
    found += [text for name, text in places.items() if setup.setting(name)]
    switches = {
        "enable_p2p": "P2P peers",
        "enable_pd": "the prefill or decode instance",
        "enable_controller": "instances of the same controller",
    }
    return found + [text for name, text in switches.items() if setup.on(name)]


def _no_bytes(setup: Setup) -> str:
    """Return why this LMCache cannot use vLLM's hashes, which are bytes (KVD739, KVD738), or "" if it can."""
    if setup.lmcache is None or "-> bytes" not in setup.packages.text("vllm.utils.hashing"):
        return ""
    stored = setup.setting("remote_url") or setup.setting("local_disk")
    if stored and "chunk_hash_hex" not in setup.packages.text("lmcache.utils"):
        return "this LMCache stores no chunk on disk or in a remote cache if the keys are bytes"
    if setup.on("enable_async_loading") and "int.from_bytes" not in setup.packages.text("lmcache.v1.token_database"):
        return "the asynchronous lookup of this LMCache fails, because it needs hashes that are numbers"
    return ""


def _hashes_none(setup: Setup) -> bool:
    """Return True if LMCache hashes None. Before Python 3.12, the hash of None differs between processes (KVF901)."""
    source = setup.packages.text("lmcache.v1.token_database")
    return bool(source) and "_canonicalize_hash_inputs" not in source and sys.version_info < (3, 12)


@check("transfer-mode")
def transfer_mode(setup: Setup) -> Iterator[Line]:
    """The server supports the transfer mode that the multi-process worker asks for."""
    if setup.mp is None:
        return
    # The connector's key overrides the environment variable (vllm_multi_process_adapter.py 0.5.6, ExtraConfigDefault).
    given = setup.mp.extra.get("lmcache.mp.mp_transfer_mode") or setup.environment.get("LMCACHE_MP_TRANSFER_MODE")
    mode = str(given or "auto").lower()
    for server in setup.servers:
        if not server.options:
            what = f"the transfer modes of the server at {server.address.url} are unknown"
            yield unchecked(what, "lmcache server --supported-transfer-mode auto accepts every worker")
            continue
        known = [setup.server_options.get(f"--{each}") for each in ("supported-transfer-mode", "transfer-mode")]
        default = next((option.default for option in known if option), "auto")
        supported = str(server.options.get("supported_transfer_mode") or server.options.get("transfer_mode") or default)
        # A worker without a GPU asks for engine_driven.
        asks = "engine_driven" if mode == "auto" and setup.on_cpu and "lmcache" in supported else mode
        if asks not in ("auto", supported) and supported != "auto":
            yield problem(
                f"the worker asks for {asks}, but the server at {server.address.url} supports {supported} only: the "
                "worker dies after mq_timeout",
                "lmcache server --supported-transfer-mode auto; kvfix explain KVF902",
            )
        else:
            yield ok(f"transfer mode: the worker asks for {mode}, the server supports {supported}")
