"""A vLLM plugin: EngineCore and workers write JSON lines to files, and a stand-in replaces LMCache's GPU connector.

The plugin patches no function that kvfix fixes. The plugin replaces parts of LMCache only when vLLM imports LMCache,
because vLLM's CPU platform does not start if LMCache is imported earlier.
"""

import itertools
import json
import os
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import Any

REPORT = os.environ.get("KVFIX_TEST_REPORT", "")
#: {module: function to call after the import}. With KVFIX_TEST_REAL_CONNECTOR, LMCache's own GPU connector runs.
STAND_INS = {
    **({} if os.environ.get("KVFIX_TEST_REAL_CONNECTOR") else {"lmcache.v1.gpu_connector": "current_releases"}),
    "lmcache.integration.vllm.vllm_v1_adapter": "early_releases",
    "lmcache.integration.vllm.vllm_multi_process_adapter": "patient_pings",
    "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector": "in_tree",
}


def platform() -> str | None:
    """Return the class of the platform. In every process, vLLM calls this function to choose the platform."""
    return "kvfix_engine_ray.RayCpuPlatform" if "KVFIX_TEST_RAY" in os.environ else None


def load() -> None:
    if not REPORT:
        return
    stand_in()
    override_kernels_beside_llvmlite()
    if "KVFIX_TEST_FAULTS" in os.environ:
        plant_faults()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    create = KVConnectorFactory.create_connector

    def create_connector(*args: Any, **kwargs: Any) -> Any:
        import kvfix
        from kvfix.session import session

        connector = create(*args, **kwargs)
        choice, rows = session.config, [row._asdict() for row in kvfix.status()]
        note("connector", role=connector.role.name, choice=str(choice) if choice else None, status=rows)
        if os.environ.get("KVFIX_TEST_HANG"):
            from kvfix_engine_hangs import plant

            plant(connector)
        note_grants_and_loads(connector)
        if "KVFIX_TEST_TIMES" in os.environ and connector.role.name == "SCHEDULER":
            note_own_time(connector)
        return connector

    KVConnectorFactory.create_connector = staticmethod(create_connector)


def stand_in() -> None:
    """When Python imports a module in STAND_INS, call the function that STAND_INS names for this module."""
    execute = SourceFileLoader.exec_module

    def exec_module(loader: SourceFileLoader, module: Any) -> None:
        execute(loader, module)
        if module.__name__ in STAND_INS:
            import kvfix_engine_stand_ins

            getattr(kvfix_engine_stand_ins, STAND_INS[module.__name__])(module)

    SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign]


def override_kernels_beside_llvmlite() -> None:
    """Give vLLM {} if `vars()` of an llvmlite object returns no dictionary (triton_utils/dispatcher.py 0.32.0:139)."""
    from vllm.triton_utils import dispatcher

    def of(value: Any) -> Any:
        found = vars(value)
        return found if hasattr(found, "get") else {}

    dispatcher.vars = of


def plant_faults() -> None:
    from kvfix.connector_events import recorder, watched
    from kvfix.engine_state import lmcache_readers

    def planted(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted")

    for name in [each for each in vars(watched.WatchedConnector) if each.startswith(("before_", "after_"))]:
        setattr(watched.WatchedConnector, name, planted)
    for name in ("hit", "loads", "stores", "kept", "left"):
        setattr(lmcache_readers.MP, name, planted)
    recorder.add = recorder.write = planted


def note(what: str, **more: Any) -> None:
    import multiprocessing

    line = {"what": what, "pid": os.getpid(), "process": multiprocessing.current_process().name, **more}
    with open(f"{REPORT}.{os.getpid()}", "a") as file:
        file.write(json.dumps(line) + "\n")


def after(connector: Any, name: str, act: Callable[..., Any]) -> None:
    original = getattr(connector, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        act(answer, *args)
        return answer

    setattr(connector, name, method)


def note_grants_and_loads(connector: Any) -> None:
    """Note tokens that vLLM will load (grants), finished loads, and how many objects LMCache keeps in the scheduler."""

    def grant(_: Any, request: Any, blocks: Any, external: int) -> None:
        if external:
            note("grant", tokens=external, request=request.request_id)

    def load(answer: Any, *_: Any) -> None:
        for request in answer[1] or ():
            note("load", request=request)

    impl = getattr(connector, "_lmcache_engine", None)
    client = getattr(impl, "lookup_client", None)  # only the scheduler has a client
    kept: list[int] = []

    def keep(*_: Any) -> None:
        now = [len(impl.load_specs), len(impl._requests_priority), len(client.reqs_status)]
        if now != kept:
            kept[:] = now
            note("kept", load_specs=now[0], priorities=now[1], lookups=now[2])

    after(connector, "update_state_after_alloc", grant)
    after(connector, "get_finished", load)
    if hasattr(impl, "load_specs") and hasattr(client, "reqs_status"):
        after(connector, "build_connector_meta", keep)


def note_own_time(connector: Any) -> None:
    """Note kvfix's CPU time every 64 steps. If scheduler and worker share a process, the worker's time counts too."""
    from kvfix_engine_times import OwnTime

    from kvfix.session import session

    own, steps = OwnTime(each for each in session.wrapped.values() if each._wrappers), itertools.count(1)

    def step(*_: Any) -> None:
        if next(steps) % 64 == 0:
            note("own", seconds=own.seconds, calls=own.calls)

    after(connector, "build_connector_meta", step)
