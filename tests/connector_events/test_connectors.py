"""kvfix watches every connector that vLLM registers and can load here, also children of MultiConnector."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RELEASES, ForkServer

CASE = """
import inspect, kvfix
from types import SimpleNamespace
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory
loaded = {}
for name in sorted(factory._registry):
    try:
        loaded[name] = factory.get_connector_class_by_name(name)
    except ImportError as error:
        pass
from kvfix.connector_events.hooks import HOOKS
def functions(cls):
    # the function that runs for a hook: the first of this name in the mro
    return {name: vars(owner)[name] for name in HOOKS
            for owner in [next((each for each in cls.__mro__ if name in vars(each)), None)]
            if owner is not None and owner.__name__ != "KVConnectorBase_V1"}
before = {name: functions(cls) for name, cls in loaded.items()}
signatures = {name: {hook: str(inspect.signature(f)) for hook, f in found.items()} for name, found in before.items()}
kvfix.apply("observe", only=[])
for name in loaded:
    for _ in range(2):  # a second call wraps nothing again
        factory.get_connector_class(SimpleNamespace(kv_connector=name, kv_connector_module_path=None))
from kvfix import applying
watched = {name: functions(cls) for name, cls in loaded.items()}
def depth(function):
    count = 0
    while getattr(function, "__wrapped__", None) is not None:
        function, count = function.__wrapped__, count + 1
    return count
result = {name: {
    "hooks": sorted(found),
    "unwatched": [hook for hook, f in found.items() if f is before[name][hook]],
    "odd": [hook for hook, f in found.items() if str(inspect.signature(f)) != signatures[name][hook]],
    "twice": len({depth(f) for f in found.values()}) > 1,
} for name, found in watched.items()}
kvfix.revert()
for name, cls in loaded.items():
    result[name]["left"] = [hook for hook, f in functions(cls).items() if f is not before[name][hook]]
"""


LAYERS = """
import inspect, kvfix
from types import SimpleNamespace
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1 as connector
from kvfix.connector_events import hooks
from kvfix.session import session
wanted = SimpleNamespace(kv_connector="LMCacheConnectorV1", kv_connector_module_path=None)
before = [vars(connector)[name] for name in hooks.LAYER_HOOKS]
def wrapped(**more):
    kvfix.apply("observe", only=[], **more)
    factory.get_connector_class(wanted)
    return [vars(connector)[name] is not function for name, function in zip(hooks.LAYER_HOOKS, before)]
result = {"unasked": wrapped(), "asked": wrapped(layers=True)}
result["same"] = [inspect.signature(vars(connector)[name]) == inspect.signature(function)
                  for name, function in zip(hooks.LAYER_HOOKS, before)]
made = connector.__new__(connector)
calls = []
def inside():
    return [hook for hook, since in made._kvfix_watched.running.values()]
def wait(name):
    calls.append((*inside(), name) if "_kvfix_watched" in vars(made) else name)
    if name == "bad":
        raise RuntimeError("planted")
made._lmcache_engine = SimpleNamespace(wait_for_layer_load=wait, get_block_ids_with_load_errors=set)
made.wait_for_layer_load("first")
made.get_block_ids_with_load_errors()
made.wait_for_layer_load(layer_name="second")
try:
    made.wait_for_layer_load("bad")
except RuntimeError as error:
    result["raised"] = str(error)
result["order"], result["calls"], result["inside"] = calls, made._kvfix_watched.calls, inside()
result["recorded"] = [entry.event.error for entry in session.events]
kvfix.revert()
result["left"] = [vars(connector)[name] is not function for name, function in zip(hooks.LAYER_HOOKS, before)]
"""


@pytest.fixture(scope="module")
def connectors(fork_server: ForkServer) -> dict[str, Any]:
    return dict(fork_server(CASE, RELEASES / "0.5.6"))


def test_the_known_connectors_are_there(connectors: dict[str, Any]) -> None:
    assert {
        "LMCacheConnectorV1",
        "LMCacheMPConnector",
        "MultiConnector",
        "NixlConnector",
        "OffloadingConnector",
    } <= set(connectors)


def test_every_hook_is_watched_once_and_keeps_its_signature(connectors: dict[str, Any]) -> None:
    for name, found in connectors.items():
        assert {"get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"} <= set(found["hooks"])
        assert (found["unwatched"], found["odd"], found["twice"], found["left"]) == ([], [], False, []), name


@pytest.mark.parametrize(("mode", "imported"), [("fix", False), ("observe", True)])
def test_mode_fix_imports_no_connector_events(mode: str, imported: bool, fork_server: ForkServer) -> None:
    case = f"import sys, kvfix; kvfix.apply({mode!r}); result = 'kvfix.connector_events' in sys.modules"
    assert fork_server(case, RELEASES / "0.5.6") is imported


def test_hooks_of_layers_are_watched_on_request_only(fork_server: ForkServer, tmp_path: Path) -> None:
    """Their calls are counted, and their exceptions and the hook that runs now are recorded."""
    code = f"import os; os.environ['KVFIX_DUMP_DIR'] = {str(tmp_path)!r}\n{LAYERS}"
    found = fork_server(code, RELEASES / "0.5.6")
    assert (found["unasked"], found["asked"], found["left"]) == ([False, False], [True, True], [False, False])
    assert all(found["same"])
    assert found["order"] == ["first", ["wait_for_layer_load", "second"], ["wait_for_layer_load", "bad"]]
    assert found["calls"] == {"get_block_ids_with_load_errors": 1, "wait_for_layer_load": 2}
    assert (found["raised"], found["recorded"], found["inside"]) == ("planted", ["RuntimeError: planted"], [])
