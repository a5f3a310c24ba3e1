"""kvfix watches every connector that vLLM registers and can load here, also children of MultiConnector."""

import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvfix
from kvfix.session import session
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.conftest import RELEASES, ForkServer, answers

Functions = dict[str, Callable[..., Any]]


def watched() -> dict[str, dict[str, Any]]:
    """Return {connector: errors in its watched hooks}."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory

    from kvfix.connector_events.hooks import HOOKS

    def functions(cls: type) -> Functions:
        """The function that runs for each hook: the first of this name in the mro."""
        owners = {name: next((each for each in cls.__mro__ if name in vars(each)), None) for name in HOOKS}
        return {
            name: vars(owner)[name]
            for name, owner in owners.items()
            if owner is not None and owner.__name__ != "KVConnectorBase_V1"
        }

    def depth(function: Any) -> int:
        count = 0
        while getattr(function, "__wrapped__", None) is not None:
            function, count = function.__wrapped__, count + 1
        return count

    loaded = {}
    for name in sorted(factory._registry):
        with suppress(ImportError):
            loaded[name] = factory.get_connector_class_by_name(name)
    before = {name: functions(cls) for name, cls in loaded.items()}
    signatures = {
        (name, hook): str(inspect.signature(f)) for name, found in before.items() for hook, f in found.items()
    }
    kvfix.apply("observe", only=[])
    for name in loaded:
        for _ in range(2):  # a second call wraps nothing again
            factory.get_connector_class(SimpleNamespace(kv_connector=name, kv_connector_module_path=None))
    result = {}
    for name, cls in loaded.items():
        found = functions(cls)
        result[name] = {
            "hooks": sorted(found),
            "unwatched": [hook for hook, f in found.items() if f is before[name][hook]],
            "odd": [hook for hook, f in found.items() if str(inspect.signature(f)) != signatures[name, hook]],
            "twice": len({depth(f) for f in found.values()}) > 1,
        }
    kvfix.revert()
    for name, cls in loaded.items():
        result[name]["left"] = [hook for hook, f in functions(cls).items() if f is not before[name][hook]]
    return result


def watched_layers(folder: str) -> dict[str, Any]:
    os.environ["KVFIX_DUMP_DIR"] = folder
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory
    from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1 as connector

    from kvfix.engine_state.places import LAYER_HOOKS

    before = {name: vars(connector)[name] for name in LAYER_HOOKS}

    def is_wrapped() -> list[bool]:
        return [vars(connector)[name] is not function for name, function in before.items()]

    def after_apply(layers: bool) -> list[bool]:
        kvfix.apply("observe", only=[], layers=layers)
        factory.get_connector_class(SimpleNamespace(kv_connector="LMCacheConnectorV1", kv_connector_module_path=None))
        return is_wrapped()

    result: dict[str, Any] = {"unasked": after_apply(False), "asked": after_apply(True)}
    result["same"] = [
        inspect.signature(vars(connector)[name]) == inspect.signature(function) for name, function in before.items()
    ]
    made = connector.__new__(connector)
    order: list[Any] = []

    def inside() -> list[str]:
        return [hook for hook, _ in made._kvfix_watched.running.values()]

    def wait(name: str) -> None:
        order.append((*inside(), name))
        if name == "bad":
            raise RuntimeError("planted")

    made._lmcache_engine = SimpleNamespace(wait_for_layer_load=wait)
    made.wait_for_layer_load("first")
    made.wait_for_layer_load(layer_name="second")
    with pytest.raises(RuntimeError, match="planted"):
        made.wait_for_layer_load("bad")
    result |= {"order": order, "calls": made._kvfix_watched.calls, "inside": inside()}
    result["recorded"] = [entry.event.error for entry in session.events]
    kvfix.revert()
    return {**result, "left": is_wrapped()}


@pytest.mark.parametrize(("mode", "answer"), [("fix", False), ("observe", True)])
@answers(also="answer")
def test_mode_fix_imports_no_connector_events(mode: str) -> bool:
    kvfix.apply(mode)
    return "kvfix.connector_events" in sys.modules


@pytest.fixture(scope="module")
def connectors(fork_server: ForkServer) -> dict[str, Any]:
    return dict(fork_server(watched, RELEASES / "0.5.6"))


def test_the_known_connectors_are_there(connectors: dict[str, Any]) -> None:
    known = {"LMCacheConnectorV1", "LMCacheMPConnector", "MultiConnector", "NixlConnector", "OffloadingConnector"}
    assert known <= set(connectors)


def test_every_hook_is_watched_once_and_keeps_its_signature(connectors: dict[str, Any]) -> None:
    for name, found in connectors.items():
        assert {"get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"} <= set(found["hooks"])
        assert (found["unwatched"], found["odd"], found["twice"], found["left"]) == ([], [], False, []), name


def test_hooks_of_layers_are_watched_on_request_only(fork_server: ForkServer, tmp_path: Path) -> None:
    """Their calls are counted, and their exceptions and the hook that runs now are recorded."""
    found = fork_server(watched_layers, RELEASES / "0.5.6", str(tmp_path))
    assert (found["unasked"], found["asked"], found["left"]) == ([False, False], [True, True], [False, False])
    assert all(found["same"])
    assert found["order"] == [["wait_for_layer_load", each] for each in ("first", "second", "bad")]
    assert found["calls"] == {"wait_for_layer_load": 3}
    assert (found["recorded"], found["inside"]) == (["RuntimeError: planted"], [])


@answers([[128, 128, 128], [None, 128, 0], [128, 128, 128], [[], 128]])
def test_an_unhealthy_adapter_has_no_hit_whatever_it_has_found() -> list[Any]:
    """(what the reader says of the hit, what the adapter has found, what is promised) of a request that waits for
    blocks: with its server, while that is silent, and after."""
    from kvfix.ledger import events as ev

    engine, said = late.LabEngine(Options(connector="mp", delay=0)), []
    engine.do("stored_elsewhere", prompt(128))
    engine.keep_blocks(0)
    engine.admit("r", prompt(140))
    for then in ("server_goes_on", "server_stops", "server_goes_on"):
        engine.do(then)
        engine.step(3)
        asked = [event for _, event in engine.log if isinstance(event, ev.Asked)]
        found = engine.connector.scheduler_adapter._finished_lookup_results["r"]
        said.append((engine.connector.reader.hit("r"), found, asked[-1].promised))
    engine.free_blocks()
    engine.run()
    return [*said, (engine.findings, engine.counts["loaded_tokens"])]
