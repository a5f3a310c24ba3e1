"""kvfix watches every connector that vLLM registers and can import here, and the children of MultiConnector."""

import inspect
import os
import tempfile
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

import kvfix
from kvfix.engine_state.places import HOOKS, LAYER_HOOKS
from kvfix.ledger import events as ev
from kvfix.session import session
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.conftest import ForkServer, answers


def play_all() -> dict[str, dict[str, list[str]]]:
    """Return each connector's hooks, the hooks not wrapped exactly once, and the hooks still wrapped after a revert."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    def functions(cls: type) -> dict[str, Any]:
        found = {name: inspect.getattr_static(cls, name, None) for name in HOOKS}
        return {name: each for name, each in found.items() if each is not vars(KVConnectorBase_V1).get(name)}

    loaded = {}
    for name in sorted(factory._registry):
        with suppress(ImportError):
            loaded[name] = factory.get_connector_class_by_name(name)
    before = {name: functions(cls) for name, cls in loaded.items()}
    kvfix.apply("observe", only=[])
    for name in loaded:
        for _ in range(2):  # the second call must not wrap again
            factory.get_connector_class(SimpleNamespace(kv_connector=name, kv_connector_module_path=None))
    watched = {name: functions(cls) for name, cls in loaded.items()}
    kvfix.revert()
    left = {name: functions(cls) for name, cls in loaded.items()}
    return {
        name: {
            "hooks": sorted(own),
            "unwatched": [hook for hook in own if getattr(watched[name][hook], "__wrapped__", None) is not own[hook]],
            "left": [hook for hook in own if left[name][hook] is not own[hook]],
        }
        for name, own in before.items()
    }


@answers([[False] * 2, [True] * 2, ["wait_for_layer_load"] * 3, 3, ["RuntimeError: planted"], [], [False] * 2])
def test_hooks_of_layers_are_watched_on_request_only() -> list[Any]:
    """Return whether hooks are wrapped (without `layers`, with `layers`, after a revert), and the recorded calls."""
    os.environ["KVFIX_DUMP_DIR"] = tempfile.mkdtemp(prefix="kvfix-test-")
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory
    from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1 as connector

    before = {name: vars(connector)[name] for name in LAYER_HOOKS}

    def is_wrapped() -> list[bool]:
        return [vars(connector)[name] is not function for name, function in before.items()]

    found: list[Any] = []
    for layers in (False, True):
        kvfix.apply("observe", only=[], layers=layers)
        factory.get_connector_class(SimpleNamespace(kv_connector="LMCacheConnectorV1", kv_connector_module_path=None))
        found.append(is_wrapped())
    made, inside = connector.__new__(connector), []

    def wait(name: str) -> None:
        inside.extend(hook for hook, _ in made._kvfix_watched.running.values())
        if name == "bad":
            raise RuntimeError("planted")

    made._lmcache_engine = SimpleNamespace(wait_for_layer_load=wait)
    made.wait_for_layer_load("first")
    made.wait_for_layer_load(layer_name="second")
    with suppress(RuntimeError):
        made.wait_for_layer_load("bad")
    watched = made._kvfix_watched
    found += [inside, *watched.calls.values(), [entry.event.error for entry in session.events], list(watched.running)]
    kvfix.revert()
    return [*found, is_wrapped()]


@pytest.mark.parametrize(("mode", "imported"), [("fix", False), ("observe", True)])
def test_mode_fix_imports_no_connector_events(mode: str, imported: bool, fork_server: ForkServer) -> None:
    code = f"import sys, kvfix\nkvfix.apply({mode!r})\nresult = 'kvfix.connector_events' in sys.modules"
    assert fork_server(code) is imported


def test_every_hook_of_every_connector_is_watched_once(outcomes: dict[str, Any]) -> None:
    known = {"LMCacheConnectorV1", "LMCacheMPConnector", "MultiConnector", "NixlConnector", "OffloadingConnector"}
    assert known <= set(outcomes)
    for name, found in outcomes.items():
        assert {"get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"} <= set(found["hooks"])
        assert (found["unwatched"], found["left"]) == ([], []), name


@answers([[128, 128, 128], [None, 128, 0], [128, 128, 128], [[], 128]])
def test_an_unhealthy_adapter_has_no_hit_whatever_it_has_found() -> list[Any]:
    """The server answers, is silent, then answers again. For each state, return hit, found and promised tokens."""
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
