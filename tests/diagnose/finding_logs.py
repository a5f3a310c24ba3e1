"""Logs in which each finding must be found, and logs that look like it and have none, made of tests.diagnose.lines."""

from functools import lru_cache

from tests.diagnose.lines import (
    FATAL,
    LOGS,
    NEWEST,
    V1,
    asked,
    bare,
    below,
    crash,
    fail,
    framed,
    handler_failed,
    logged,
    raised,
    rows,
    site_packages,
    stats,
    transfer_asserts,
    unread,
    version,
    vllm,
    vllm_unread,
)

LOOKUPS = "v1/lookup_client/lmcache_async_lookup_client.py"
METADATA = (
    "LMCacheMetadata(model_name='{}', world_size={}, worker_id=0, kv_dtype=torch.bfloat16, "
    "kv_shape=(36, 2, {}, 8, 128))"
)
SEED = logged(NEWEST, "hash_seed", which="builtin")
DECODES = (
    "(APIServer pid=7) INFO 12-03 01:24:01 [utils.py:253] non-default args: {'kv_transfer_config': KVTransferConfig("
    "kv_connector='NixlConnector', kv_role='kv_consumer')}\n"
)
STARTS = vllm("vllm_version", "0.32.0", "model='m'", which="Initializing")
ANSWERED_500 = (
    '(APIServer pid=7) INFO:     10.0.0.3:40022 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n'
)
MP = "integration/vllm/vllm_multi_process_adapter.py"
DRIVEN = "v1/multiprocess/modules/lmcache_driven_transfer.py"
LOOKUP = "v1/multiprocess/modules/lookup.py"
OFFLOADS = "(APIServer pid=7) INFO 12-03 01:24:01 [utils.py:253] non-default args: {'kv_offloading_size': 16.0}\n"
NOWHERE = "('', '', 0, '')"
#: A failure that no record knows.
WHAT = "RuntimeError: what?"
ADAPTER = "lmcache/integration/vllm/vllm_v1_adapter.py"
RUNNER = ("vllm/v1/gpu_model_runner.py", "execute_model", "call()")

#: A stack of a hung engine from `py-spy dump`. Functions and lines are those of LMCache 0.5.6 and vLLM 0.32.0.
DUMP = (LOGS / "stacks-0.5.6.txt").read_text()


def worker(model: str = "/m/a", ranks: int = 1, chunk: int = 256, release: str = NEWEST) -> str:
    """The line of a worker that names its model and its chunks."""
    metadata = METADATA.format(model, ranks, chunk)
    return logged(release, "version", "KVConnectorRole.WORKER", release, "0.32.0", metadata)


def lookups(number: int, total: int, computed: int = 0, release: str = NEWEST) -> str:
    return "".join(asked(release, total, computed, 0, 0, f"r{n}") for n in range(number))


def moved(rate: float, size: float = 512.0) -> str:
    """An interval's transfers: the names are those of nixl/stats.py, joined by kv_connector/v1/metrics.py."""
    values = {
        "Num successful transfers": 3, "Avg xfer time (ms)": 9.1, "P90 xfer time (ms)": 9.9, "Avg post time (ms)": 1.8,
        "P90 post time (ms)": 2.1, "Avg MB per transfer": size, "Throughput (MB/s)": rate,
    }  # fmt: skip
    source = (site_packages() / "vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py").read_text()
    named = [source.index(f'"{name}"') for name in values]
    assert named == sorted(named)
    return framed("KV Transfer metrics: %s", ", ".join(f"{k}={v}" for k, v in values.items()), at="metrics.py:103")


def intervals(number: int, running: int = 0, waiting: int = 0, generation: float = 0.0, **more: float) -> str:
    """Statistics of so many intervals of ten seconds."""
    return "".join(stats(running, waiting, generation, 10 * n, **more) for n in range(number))


def stores(number: int, process: str = "") -> str:
    return "".join(f"{process}{logged(NEWEST, 'stored', f'r{n}', 512, 512, which='offload')}" for n in range(number))


def large(size: float) -> str:
    """Twelve prompts without a hit, and stores of so many GB."""
    return "".join(
        asked(NEWEST, 4096, 0, 0, 0, f"r{n}") + logged(NEWEST, "stored", f"r{n}", 4096, 4096, size, 9.0, 80.0, 8.0, 1)
        for n in range(12)
    )


def without_hits() -> dict[str, list[str]]:
    settings = {"chunk_size": 256, "local_cpu": True, "enable_p2p": True, "enable_async_loading": False}
    configured = logged(NEWEST, "configured", str({**settings, "enable_async_loading": True, "local_cpu": False}))
    return {
        "KVD305": [
            SEED + stores(10) + lookups(100, 300),
            worker() + SEED + stores(10) + lookups(10, 900, computed=512),
            SEED + stores(10, "(VllmWorker TP1 pid=9) ") + lookups(10, 900),
            logged("0.3.9", "hash_seed", which="Centralized") + stores(1) + lookups(10, 900),
        ],
        "KVD320": [lookups(10, 26), worker(chunk=512) + lookups(10, 300), lookups(10, 26, release="0.3.12")],
        "KVD321": [lookups(10, 900), "kv_connector='LMCacheConnectorV1', kv_role='kv_consumer'\n" + lookups(12, 900)],
        "KVD322": [worker() + stores(10) + lookups(10, 900, computed=128)],
        "KVD323": ["".join(below(NEWEST, f"r{n}", 0, 256) for n in range(10))],
        "KVD324": [
            logged(release, message, str(settings)) + lookups(10, 900)
            for release in ("0.3.12", NEWEST)
            for message in ("configured", "engine_configured")
        ],
        "KVD325": [
            logged(NEWEST, "peer_asked", NOWHERE) * 10 + lookups(10, 900),
            configured + logged("0.3.10", "peer_asked", NOWHERE) * 10 + lookups(10, 900),
        ],
        "KVD326": [
            logged(NEWEST, "configured", "{'remote_url': 'redis://h:6379'}")
            + worker("/m/a") + worker("/models/a", 2) + stores(10) + lookups(10, 900)
        ],
        "KVD539": [vllm("draft_groups", groups, release="0.26.0") for groups in ("[0, 1, 2, 3]", "[0, 1]")],
    }  # fmt: skip


@lru_cache(maxsize=1)
def hits() -> dict[str, list[str]]:
    return {
        **without_hits(),
        "KVD101": [
            version("0.3.10") + asked("0.3.10", 10009, 336, 256, -80)
            + crash("0.3.10", "mismatch", 256, 256, 336, 0, "cmpl-1"),
            asked("0.3.10", 10009, 336, 256, -80) + crash("0.3.10", "mismatch", 256, 256, 80, 0, "cmpl-1"),
            crash("0.3.10", "mismatch", 256, 256, 336, 0, "cmpl-1").replace(" for request cmpl-1", ""),
        ],
        "KVD102": [
            version(release) + crash(release, "mismatch", 1024, 1024, 80, 0, "cmpl-1") for release in ("0.4.7", NEWEST)
        ] + [
            crash(NEWEST, "mismatch", 128, 192, 96, 0, "cmpl-1"),
            asked(NEWEST, 3000, 80, 2048, 1968) + crash(NEWEST, "mismatch", 1024, 1024, 80, 0, "cmpl-1"),
        ],
        "KVD103": [
            below(release, "r1", 800, 1024) + crash(release, "resume_differs", "r1", 800, 1024, False)
            for release in ("0.3.14", "0.4.2", "0.4.3", NEWEST)
        ],
        "KVD104": [crash(release, "no_load_spec", "r1") for release in ("0.3.11", "0.4.4", NEWEST)],
        "KVD105": [
            crash(release, "resume_differs", "r1", 1023, 1024) for release in ("0.3.10.post1", "0.3.11", "0.4.2")
        ],
        "KVD106": [crash(release, "resume_differs", "r1", 800, 512) for release in ("0.3.10.post1", "0.3.10.post2")],
        "KVD107": [crash(release, "resume_differs", "r1", 48640, 48128, False) for release in ("0.4.3", NEWEST)],
        "KVD108": [
            bare(release, V1, "request_finished", "assert self.lmcache_engine is not None")
            for release in ("0.4.5", "0.4.6", "0.4.7", "0.5.0")
        ],
        "KVD110": [crash(release, "no_tracker", "r1") for release in ("0.4.5", NEWEST)],
        "KVD112": [
            version(release) + bare(release, V1, "wait_for_save", "assert len(slot_mapping) == len(token_ids)")
            for release in ("0.3.9", "0.3.15")
        ],
        "KVD116": [
            fail(release, row, *(["tcp://h:5"] if row.level == "text" else []), "300.0")
            for release in ("0.4.2", NEWEST)
            for message in ("server_silent", "server_unreachable")[: 2 if release == NEWEST else 1]
            for row in rows(release, message)
        ],
        "KVD117": [
            bare("0.3.15", V1, "wait_for_save", "assert len(slot_mapping) == len(token_ids)").replace(
                "(EngineCore_DP0 pid", "(Worker_TP0_DCP0 pid"
            ),
            "(Worker_TP0_DCP0 pid=7) " + unread("0.3.13", LOOKUPS, "Error processing request from scheduler", ""),
        ],
        "KVD201": [stats(running=1, waiting=4) + asked("0.3.10", 900, 320, 256, -64) * 1500],
        "KVD202": [
            intervals(3, 0, 3),
            # At INFO there is but one such line.
            stats(running=2, waiting=3, generation=120.0) + stats(waiting=3, second=10),
        ],
        "KVD1196": [
            intervals(3, 16),
            stats(running=1, generation=7.0) + stats(running=1, second=10),
        ],
        "KVD203": [logged(release, "lookup_timeout", 0, "Resource temporarily unavailable") * 3
                   for release in ("0.3.9.post1", "0.3.10", NEWEST)],
        "KVD204": [logged(release, "mp_timeout", which="LOOKUP") for release in ("0.4.2", "0.4.7", NEWEST)],
        "KVD205": [logged(release, "mp_timeout", which="LOOKUP") for release in ("0.5.0", "0.5.5")],
        "KVD206": [
            logged("0.4.7", "transfer_mode", "lmcache_driven")
            + logged("0.4.7", "no_handler", "RequestType.REGISTER_KV_CACHE_NON_GPU_CONTEXT"),
            logged(NEWEST, "no_handler", "register_kv_cache_engine_driven_context"),
            logged("0.3.10", "no_handler", "RequestType.REGISTER_KV_CACHE"),
        ],
        "KVD207": [logged(release, "degraded", "No supported connector.") for release in ("0.3.14", NEWEST)],
        "KVD208": [vllm("kv_waiting", "cmpl-7", release=release) * 1000 for release in ("0.9.1", "0.32.0")],
        "KVD209": [vllm("broadcast", 60, release=release) * 2 for release in ("0.9.1", "0.11.0", "0.32.0")],
        "KVD210": [logged("0.5.0", "reaped", 7, 3600.5, False), logged(NEWEST, "unregistered", 7, which="RETRIEVE"),
                   logged("0.4.6", "good_bye_of_none", 7)],
        "KVD214": [logged(release, "reaped", 7, 130.4, True) for release in ("0.5.0", NEWEST)],
        "KVD213": [DUMP],
        "KVD211": [logged(release, "lookup_given_up", "r1", 3) for release in ("0.3.10", NEWEST)],
        "KVD212": [
            handler_failed(), handler_failed("Error handling operation register_kv_cache"),
            handler_failed("Error handling request RequestType.LOOKUP: no model"),
            handler_failed("Error in blocking handler").partition("Traceback")[0],
        ],
        "KVD271": [logged(release, "mp_failed", "r1", False, which="retrieve") for release in ("0.5.5", NEWEST)],
        "KVD272": [logged(release, "mp_failed", "r1", which="store") for release in ("0.3.13", NEWEST)],
        "KVD301": [logged(release, "mp_failed", "r1", False, which="retrieve") for release in ("0.3.13", "0.5.4")],
        "KVD479": [logged(release, "unretrievable") for release in ("0.3.9", NEWEST)],
        "KVD302": [
            logged("0.3.9", "retrieved", 0, 256, 5888, 0.1, 1.0, 2.0, which="required"),
            logged(NEWEST, "retrieved", "r1", 256, 512, 512, 0.1, 1.0, 2.0, which="required"),
            logged(NEWEST, "load_failed", "r1", 1024, 64),
        ],
        "KVD1090": [
            logged(release, "unretrievable") + logged(release, "short", 0, 31) for release in ("0.3.9", NEWEST)
        ],
        "KVD303": [
            vllm("kv_recovered", 1, 128, release="0.11.2.post2"), vllm("kv_recovered", 1, 128),
            vllm("kv_failing", 1, 9, {"a"}),
        ],
        "KVD304": [logged(release, "ranks_differ", "[256, 0]") for release in ("0.3.9.post1", NEWEST)],
        "KVD311": [logged(release, "ranks_differ", "[512, 256]") for release in ("0.3.9.post1", NEWEST)],
        "KVD306": [logged(NEWEST, "mp_servers_differ", "r1", "[1, 2]", 1)],
        "KVD307": [logged(release, "save_skipped", "r1", 1024, 1536) for release in ("0.4.7", NEWEST)],
        "KVD308": [logged("0.5.2", "mp_preempted", "{'r1'}", which="by preempted")],
        "KVD309": [logged(NEWEST, "underflow", "r1", 3, "[4]", which="RETRIEVE")],
        "KVD310": [logged(NEWEST, "keys_missing")],
        "KVD401": [logged(release, "pin_timeout", "1403", 1, 301.0) for release in ("0.3.12", NEWEST)]
        + [logged(NEWEST, "forced_unpin", 3, 10, 300)],
        "KVD402": [logged(release, "no_candidates", 0.1) * 20 for release in ("0.3.9", NEWEST)],
        "KVD403": [logged(release, "double_unpin", "1403", -1) for release in ("0.3.9", NEWEST)]
        + [logged(NEWEST, "double_unpin", "1403 ", -1)],  # as people type it
        "KVD404": [logged(NEWEST, "not_stored", which="not store") * 20],
        "KVD109": [transfer_asserts("assert req_id in self.requests")],
        "KVD111": [
            version("0.5.4").replace("0.11.2", "0.20.2")
            + transfer_asserts("assert RequestStatus.is_finished(req.status)")
        ],
        "KVD113": [
            FATAL + raised([(ADAPTER, "from_new_request", "len(it)")],
                           "TypeError: object of type 'NoneType' has no len()")
        ],
        "KVD114": [
            logged(NEWEST, "lookup_given_up", "r1", 3)
            + FATAL + raised([(f"lmcache/{LOOKUPS}", "lookup_cache", "self.kept[lookup_id]")], "KeyError: 'r1'")
        ],
        "KVD115": [bare(NEWEST, "gpu_connectors.py", "to_gpu", "assert memory_obj.tensor is not None")],
        "KVD159": [
            logged(NEWEST, "creating", "vllm-instance")
            + "(APIServer pid=1) RuntimeError: Engine core initialization failed. Failed core proc(s): {}\n",
            logged(NEWEST, "creating", "vllm-instance"),
        ],
        "KVD644": [large(0.75)],
        "KVD976": [OFFLOADS + intervals(5, 8, 0, 50.0, prompt=900.0, external=0.0)],
        "KVD1055": [DECODES + intervals(4, 3, 0, 50.0, prompt=900.0, external=0.0)],
        "KVD1065": [
            DECODES + intervals(4, 0, 2).replace("93.1%", "0.3%"),
            DECODES + stats(0, 2, 0.0).replace("93.1%", "0.3%"),
            stats(0, 2, 0.0, external=100.0).replace("2 reqs", "2 reqs, Deferred: 2 reqs").replace("93.1%", "0.3%"),
        ],
        "KVD1057": [DECODES + ANSWERED_500, DECODES + stats(0, 0, 0.0, 1) + 2 * ANSWERED_500],
        "KVD1059": [DECODES + STARTS],
        "KVD1051": [moved(320.0), moved(320.0) + moved(900.0)],
        "KVD1148": [FATAL + raised([RUNNER], WHAT).partition("Runtime")[0]],
        "KVD199": [FATAL + raised([frame], WHAT) for frame in ((ADAPTER, "start_load_kv", "call()"), RUNNER)],
    }  # fmt: skip


@lru_cache(maxsize=1)
def misses() -> list[tuple[str, str]]:
    """Looks like it, and is not: (the finding that must not be there, log)."""
    return [
        ("KVD101", version(NEWEST) + crash(NEWEST, "mismatch", 1024, 1024, 80, 0, "cmpl-1")),
        ("KVD101", asked("0.3.10", 10009, 336, 256, -80)),
        ("KVD102", version("0.3.10") + crash("0.3.10", "mismatch", 256, 256, 336, 0, "cmpl-1")),
        ("KVD103", below(NEWEST, "other", 800, 1024) + crash(NEWEST, "resume_differs", "r1", 800, 1024, False)),
        ("KVD103", below(NEWEST, "r1", 800, 1024)),
        ("KVD105", crash("0.4.3", "resume_differs", "r1", 800, 1024, False)),
        ("KVD107", crash("0.3.10.post1", "resume_differs", "r1", 800, 512)),
        # The warning that takes the place of the assertion; it comes with every abort.
        ("KVD108", logged("0.5.1", "aborted", "r1", which="backend")),
        ("KVD108", bare(NEWEST, V1, "wait_for_save", "assert self.lmcache_engine is not None")),
        ("KVD201", stats(running=8, waiting=4, generation=120.0) + asked("0.3.10", 900, 320, 256, -64) * 1500),
        ("KVD201", stats(running=1, waiting=4) + asked("0.3.10", 900, 320, 256, -64) * 900),
        ("KVD201", stats(running=1, waiting=4) + "".join(
            asked(NEWEST, 900, 0, 256, 256, "a") + asked(NEWEST, 900, 0, 256, 256, "b") for _ in range(800))),
        # Asked about once more with something to load; one line; one among others.
        ("KVD201", asked(NEWEST, 900, 0, 256, 256) * 2),
        ("KVD201", asked("0.3.10", 900, 320, 256, -64)),
        ("KVD201", asked("0.3.10", 900, 320, 256, -64) * 2 + stores(1)),
        ("KVD202", intervals(9)),
        ("KVD202", (stats(waiting=3) * 2 + stats(running=1, waiting=2, generation=0.1)) * 2),
        ("KVD202", stats(running=4, waiting=3, generation=0.1) + stats()),
        # A long prefill, and its end.
        ("KVD1196", stats(running=2, second=10) * 2 + stats(running=2, generation=80.0)),
        ("KVD1196", intervals(3, 2, 1)),
        ("KVD202", intervals(3, 2)),
        ("KVD203", logged(NEWEST, "lookup_timeout", 0, "Resource temporarily unavailable") * 2),
        ("KVD205", logged("0.5.5", "mp_timeout", which="LOOKUP") + logged("0.5.5", "mp_healthy")),
        ("KVD205", logged(NEWEST, "mp_timeout", which="LOOKUP")),
        ("KVD206", logged(NEWEST, "transfer_mode", "auto")),
        ("KVD208", vllm("kv_waiting", "cmpl-7") * 900),
        ("KVD208", vllm("kv_waiting", "cmpl-7")),
        ("KVD208", vllm("kv_waiting", "cmpl-7") + vllm("kv_waiting", "cmpl-8") * 2),
        ("KVD208", vllm("kv_waiting", "cmpl-7") * 2 + stores(1)),
        ("KVD209", vllm("broadcast", 60)),
        ("KVD271", logged("0.5.4", "mp_failed", "r1", False, which="retrieve")),
        ("KVD271", logged(NEWEST, "mp_failed", "r1", which="store")),
        ("KVD272", logged(NEWEST, "mp_failed", "r1", False, which="retrieve")),
        ("KVD301", logged("0.5.5", "mp_failed", "r1", False, which="retrieve")),
        ("KVD301", logged("0.5.4", "mp_failed", "r1", which="store")),
        ("KVD479", logged(NEWEST, "unretrievable")
         + logged(NEWEST, "retrieved", "r1", 512, 512, 512, 0.1, 1.0, 2.0, which="required")),
        ("KVD302", logged(NEWEST, "retrieved", "r1", 512, 512, 512, 0.1, 1.0, 2.0, which="required")),
        ("KVD302", logged(NEWEST, "unretrievable") + logged(NEWEST, "short", 0, 31)),
        ("KVD1090", logged(NEWEST, "short", 0, 31)),
        ("KVD1090", logged(NEWEST, "unretrievable") + logged(NEWEST, "short", 31, 31)),
        # On each resume after a preemption.
        ("KVD302", logged(NEWEST, "rolled_back", "r1", 320, 256)),
        ("KVD305", SEED),
        # All prompts are new, in one process: no hit is expected, with or without a seed.
        ("KVD305", SEED + stores(10) + lookups(10, 900)),
        ("KVD305", SEED + stores(10, "(VllmWorker TP1 pid=9) ") + lookups(10, 900)
         + asked(NEWEST, 900, 0, 512, 512, "x")),
        # Up to 0.3.10.post2 a chunk need not be full: it is stored.
        ("KVD320", stores(1) + lookups(10, 26)),
        ("KVD320", lookups(9, 26)),
        # Lookups of one request count once.
        ("KVD320", asked(NEWEST, 26, 0, 0, 0) * 50),
        ("KVD320", lookups(10, 26) + asked(NEWEST, 26, 0, 26, 25, "x")),
        ("KVD321", stores(1) + lookups(10, 900)),
        ("KVD321", lookups(10, 26)),
        ("KVD322", worker() + stores(10) + lookups(10, 900)),
        ("KVD322", worker(chunk=64) + stores(10) + lookups(10, 900, computed=128)),
        ("KVD323", "".join(below(NEWEST, f"r{n}", 0, 0) for n in range(20))),
        ("KVD323", "".join(below(NEWEST, f"r{n}", 0, 256) for n in range(20)) + asked(NEWEST, 900, 0, 512, 512, "x")),
        ("KVD324", logged(NEWEST, "configured", "{'enable_p2p': False, 'enable_async_loading': False}")
         + lookups(10, 900)),
        ("KVD324", logged(NEWEST, "configured", "{'enable_p2p': True, 'enable_async_loading': True}")
         + lookups(10, 900)),
        ("KVD325", logged(NEWEST, "peer_asked", NOWHERE) * 10 + lookups(10, 900)
         + logged(NEWEST, "peer_asked", "('engine_2', 'LocalCPUBackend', 4, '10.0.0.2:8200')")),
        # Engines of one machine that share nothing.
        ("KVD326", worker("/m/a") + worker("/m/b") + stores(10) + lookups(10, 900)),
        ("KVD308", logged("0.5.2", "mp_preempted", "{'r1'}", which="by resumed")),
        ("KVD308", logged(NEWEST, "mp_preempted", "{'r1'}", which="by preempted")),
        ("KVD402", logged(NEWEST, "no_candidates", 0.1) * 19 + stores(1)),
        ("KVD404", logged(NEWEST, "not_stored", which="not store") * 19 + stores(1)),
        # It went on.
        ("KVD159", logged(NEWEST, "creating", "vllm-instance") + version(NEWEST)
                   + "(APIServer pid=1) RuntimeError: Engine core initialization failed.\n"),
        ("KVD159", logged(NEWEST, "creating", "vllm-instance") + asked(NEWEST, 1024, 0, 0, 0)),
        # There is no such buffer.
        ("KVD159", unread(NEWEST, "v1/cache_engine.py", "LMCacheEngine with config", "{'max_local_cpu_size': 0.0}")),
        # It fits.
        ("KVD644", large(0.25)),
        # One interval with a hit; and no connector that keeps anything.
        ("KVD976", OFFLOADS + "".join(stats(8, 0, 50.0, n, prompt=900.0, external=0.1 * (n == 2)) for n in range(6))),
        ("KVD976", intervals(6, 8, 0, 50.0, prompt=900.0, external=0.0)),
        # A fetch; an engine of both roles; and too short a time.
        ("KVD1055", DECODES + "".join(stats(3, 0, 50.0, n, prompt=900.0, external=0.1 * (n == 2)) for n in range(6))),
        ("KVD1055", DECODES.replace("kv_consumer", "kv_both")
                    + intervals(6, 3, 0, 50.0, prompt=900.0, external=0.0)),
        ("KVD1055", DECODES + intervals(2, 3, 0, 50.0, prompt=900.0, external=0.0)),
        # Another connector; an engine that computes; and one that has no block left.
        ("KVD1065", OFFLOADS + intervals(4, 0, 2)),
        ("KVD1065", DECODES + intervals(4, 1, 2, 9.0).replace("93.1%", "0.3%")),
        ("KVD1065", DECODES + intervals(4, 0, 2)),
        ("KVD1065", stats(0, 2, 0.0, external=100.0).replace("93.1%", "0.3%")),
        ("KVD202", stats(0, 2, 0.0, external=100.0).replace("2 reqs", "2 reqs, Deferred: 2 reqs").replace("93", "0")),
        # The error is there; and another answer.
        ("KVD1057", ANSWERED_500 + vllm("fatal")),
        ("KVD1057", ANSWERED_500.replace("500 Internal Server Error", "200 OK")),
        # It came up, or works; and no connector.
        ("KVD1059", DECODES + STARTS + "(APIServer pid=7) INFO:     Application startup complete.\n"),
        ("KVD1059", DECODES + STARTS + stats(1, 0, 50.0, 1)),
        ("KVD1059", STARTS),
        # One fast interval; and transfers too small to say anything.
        ("KVD1051", moved(320.0) + moved(12000.0)),
        ("KVD1051", moved(320.0, size=0.5)),
        # A failed load that vLLM recovers from is no failure of the engine.
        ("KVD199", vllm("kv_recovered", 1, 512)),
        ("KVD1148", hits()["KVD199"][0]),
        # The same threads outside of a hook.
        ("KVD213", DUMP.replace("get_num_new_matched_tokens", "step")),
        ("KVD113", raised([("vllm/x.py", "f", "len(it)")], "TypeError: object of type 'NoneType' has no len()")),
        # The other assertions of a resume.
        ("KVD104", crash(NEWEST, "resume_differs", "r1", 800, 1024, False)),
        ("KVD106", crash("0.3.10.post1", "resume_differs", "r1", 256, 512)),
        ("KVD106", crash("0.4.3", "resume_differs", "r1", 800, 512, False)),
        # The other assertion of the same function of the scheduler, and its healthy line.
        ("KVD109", transfer_asserts("assert RequestStatus.is_finished(req.status)")),
        ("KVD109", vllm_unread("Finished recving KV transfer", "r1")),
        ("KVD111", transfer_asserts("assert req_id in self.requests")),
        # The same assertion with another connector.
        ("KVD111", transfer_asserts("assert RequestStatus.is_finished(req.status)")),
        # A request that is not found, in another dictionary.
        ("KVD110", unread(NEWEST, ADAPTER.removeprefix("lmcache/"), "not found in _unfinished_requests", "r1")),
        # The warning that took the assertion's place in 0.4.7; and another assertion of the function.
        ("KVD112", logged(NEWEST, "save_skipped", "r1", 1024, 1536)),
        ("KVD112", bare("0.3.15", V1, "wait_for_save", "assert len(self.kv_caches) > 0")),
        ("KVD114", logged(NEWEST, "lookup_given_up", "r1", 3)),
        ("KVD114", raised([(ADAPTER, "get_num_new_matched_tokens", "it['r1']")], "KeyError: 'r1'")),
        ("KVD115", logged(NEWEST, "double_unpin", "1403", -1)),
        # The file's name is that of releases before asynchronous loading lost its count.
        ("KVD115", bare("0.3.12", "gpu_connector.py", "to_gpu", "assert memory_obj.tensor is not None")),
        ("KVD115", bare(NEWEST, "gpu_connectors.py", "to_gpu", "assert memory_obj.raw_tensor is not None")),
        # The server stops to answer later: the worker continues.
        ("KVD116", logged(NEWEST, "mp_timeout", which="LOOKUP")),
        ("KVD116", unread(NEWEST, MP, "did not respond to unregister", 5)),
        # The line of a worker without context parallelism.
        ("KVD117", "(Worker_TP0 pid=7) " + unread("0.3.13", LOOKUPS, "Error processing request from scheduler", "")),
        ("KVD117", bare("0.3.15", V1, "wait_for_save", "assert len(slot_mapping) == len(token_ids)")),
        ("KVD204", logged(NEWEST, "mp_healthy")),
        ("KVD204", unread(NEWEST, MP, "Heartbeat stop requested")),
        ("KVD207", unread(NEWEST, "v1/cache_engine.py", "unhealthy, skipping lookup")),
        ("KVD210", logged(NEWEST, "reaped", 7, 130.4, True)),
        # A worker that ends says good-bye twice: no one is refused.
        ("KVD210", logged(NEWEST, "good_bye", 7) + logged(NEWEST, "good_bye_of_none", 7)),
        ("KVD214", logged(NEWEST, "reaped", 7, 3600.5, False)),
        # A record explains what failed in the handler.
        ("KVD212", handler_failed(error="No GPU context registered for instance ID 7")),
        ("KVD210", unread(NEWEST, DRIVEN, "Unregistered KV cache for GPU ID", 7)),
        ("KVD210", unread(NEWEST, DRIVEN, "already registered; refreshing liveness", 7)),
        # A session is ended after its worker has gone: no client waits for that answer.
        ("KVD212", handler_failed(function="end_session")),
        ("KVD304", logged(NEWEST, "ranks_differ", "[512, 256]")),
        ("KVD311", logged(NEWEST, "ranks_differ", "[512, 0]")),
        # An asynchronous lookup that has not answered yet.
        ("KVD211", logged(NEWEST, "asked", "r1", 900, 0, which="tokens: None")),
        ("KVD303", vllm_unread("Finished recving KV transfer", "r1")),
        ("KVD304", unread(NEWEST, "v1/storage_backend/storage_manager.py", "Responding to scheduler", "r1", 256)),
        ("KVD306", logged(NEWEST, "mp_prefetched")),
        ("KVD307", unread(NEWEST, "v1/cache_engine.py", "Freeze mode enabled, skipping store operation", 256)),
        ("KVD309", unread(NEWEST, "v1/multiprocess/modules/experimental/qstore.py", "STORE_Q block ID underflow")),
        ("KVD310", unread(NEWEST, LOOKUP, "not found, skipping touch", "r1")),
        ("KVD310", unread(NEWEST, LOOKUP, "not found (already completed", "r1")),
        ("KVD539", vllm("draft_groups", "[3]", release="0.26.0")),
        ("KVD539", vllm("draft_groups", "[1, 2]", release="0.26.0")),
        ("KVD539", "INFO 12-03 01:24:30 [core.py:7] Initializing a V1 LLM engine (v0.32.0)\n"
            + vllm("draft_groups", "[0, 1]")),
        ("KVD401", unread(NEWEST, "v1/pin_monitor.py", "PinMonitor check", 12, 0, 0)),
        ("KVD401", unread(NEWEST, "v1/pin_monitor.py", "Registered pinned object", "1403", 1.5)),
        # A reference too few is not a pin too few.
        ("KVD403", unread(NEWEST, "v1/memory_management.py", "Double free occurred", "1403", -1)),
    ]  # fmt: skip
