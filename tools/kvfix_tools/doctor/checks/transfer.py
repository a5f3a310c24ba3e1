"""Check the KV-transfer configuration of the command (--kv-transfer-config)."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvfix_tools.doctor.checks import Line, check, ok, problem, remedy, unchecked
from kvfix_tools.doctor.command_line import Connector
from kvfix_tools.doctor.definitions import READERS, VLLM_CONNECTORS, connector_keys, nearest, wrong_type
from kvfix_tools.doctor.packages import Packages, assigned, constant, defined
from kvfix_tools.doctor.setup import Setup

_EXAMPLE = """--kv-transfer-config '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'"""


@check("kv-transfer-config", essential=True)
def configuration(setup: Setup) -> Iterator[Line]:
    """--kv-transfer-config is valid JSON, and the installed vLLM knows its keys, values and connector."""
    if not setup.command.serves:
        return
    transfer, why = setup.transfer
    if why:
        yield problem(f"--kv-transfer-config is not JSON: {why}", remedy("KVD744"))
        return
    if not transfer:
        yield unchecked("the command has no --kv-transfer-config: no connector is used", _EXAMPLE)
        return
    faults = [line for each in setup.connectors for line in _entry(setup, each)]
    names = " with ".join(each.name for each in setup.connectors)
    yield from faults or [ok(f"--kv-transfer-config: {names}, kv_role {transfer.get('kv_role')}")]


def _entry(setup: Setup, entry: Connector) -> Iterator[Line]:
    fields = _fields(setup.packages)
    for key, value in entry.keys.items():
        choices = fields.get(key)
        if fields and key not in fields:
            near = nearest(key, fields)
            where = '"kv_connector_extra_config": {...}' if key.startswith("lmcache.") else ""
            do = f'"{near}"' if near else f"move {key} into {where}" if where else f"use one of {', '.join(fields)}"
            yield problem(f"{setup.vllm_title} has no key {key!r} in --kv-transfer-config", do)
        elif choices and value is not None and value not in choices:
            near = nearest(str(value), choices)
            yield problem(f"{key} {value!r} is not one of {', '.join(choices)}", f'"{key}": "{near or choices[-1]}"')
    if "kv_connector_extra_config" in entry.keys and not isinstance(entry.keys["kv_connector_extra_config"], dict):
        yield problem("kv_connector_extra_config is not a JSON object", '"kv_connector_extra_config": {"KEY": VALUE}')
    if not entry.name:
        yield problem("kv_connector is missing in --kv-transfer-config", _EXAMPLE)
        return
    if not entry.role:
        yield problem(f"{entry.name} has no kv_role", '"kv_role": "kv_both" (or kv_producer, kv_consumer)')
    yield from _registered(setup, entry)
    if entry.name == "MultiConnector" and not entry.extra.get("connectors"):
        yield problem("MultiConnector has no connectors", '"kv_connector_extra_config": {"connectors": [{...}, {...}]}')


def _registered(setup: Setup, entry: Connector) -> Iterator[Line]:
    if entry.module:
        package = setup.packages.get(entry.module.partition(".")[0])
        tree = setup.packages.tree(entry.module)
        if not (package and package.file(entry.module)) and not _is_file(setup, entry.module):
            yield problem(f"this Python has no module {entry.module}", "correct kv_connector_module_path")
        elif tree is not None and entry.name not in {getattr(node, "name", None) for node in ast.walk(tree)}:
            yield problem(f"{entry.module} has no class {entry.name}", "correct kv_connector")
        return
    known = _connectors(setup.packages)
    if known and entry.name not in known:
        near = next((name for name in sorted(known) if name.startswith(entry.name)), nearest(entry.name, known))
        what = f"{setup.vllm_title} has no connector {entry.name!r}"
        yield problem(what, f'"kv_connector": "{near}"' if near else f"use one of {', '.join(sorted(known))}")


def _is_file(setup: Setup, module: str) -> bool:
    """Return True if the current folder, or a folder of PYTHONPATH, has the module as one file."""
    places = ["", *setup.environment.get("PYTHONPATH", "").split(os.pathsep)]
    return any(Path(place, *module.split(".")).with_suffix(".py").is_file() for place in places)


def _fields(packages: Packages) -> dict[str, list[str]]:
    """Return {field of KVTransferConfig: allowed values}. [] allows any value. Return {} for an unreadable class."""
    tree = packages.tree("vllm.config.kv_transfer")
    node = defined(tree, "KVTransferConfig")
    return {
        each.target.id: list(dict.fromkeys(_choices(each.annotation, tree)))
        for each in (node.body if tree and node else ())
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def _choices(node: ast.AST, module: ast.Module | None) -> Iterator[str]:
    """Yield the values that an annotation allows, for example `Literal[...] | None` or the alias KVRole."""
    for each in ast.walk(node):
        if isinstance(each, ast.Subscript) and ast.unparse(each.value).endswith("Literal"):
            constants = (one.value for one in ast.walk(each.slice) if isinstance(one, ast.Constant))
            yield from (value for value in constants if isinstance(value, str))
        if isinstance(each, ast.Name) and (alias := assigned(module, each.id)):
            yield from _choices(alias, module)


def _connectors(packages: Packages) -> set[str]:
    tree = packages.tree("vllm.distributed.kv_transfer.kv_connector.factory")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args] if tree else []
    return {str(constant(each.args[0])) for each in calls if ast.unparse(each.func).endswith(".register_connector")}


@check("connector-keys")
def keys(setup: Setup) -> Iterator[Line]:
    """The connector knows all keys `lmcache.*` of kv_connector_extra_config, and their values have the right type."""
    for entry in setup.lmcache_connectors:
        given = {key: value for key, value in entry.extra.items() if key.startswith("lmcache")}
        known = connector_keys(entry.is_v1, setup.packages)
        yield from _without_prefix(setup, entry, known)
        if not given:
            continue
        if not known:
            yield unchecked(f"the keys of {entry.name} were not checked: its source is not installed here")
            continue
        faults = [line for key, value in given.items() for line in _key(setup, entry, key, value, known)]
        yield from faults or [ok(f"{entry.name} knows all {len(given)} keys lmcache.*")]


def _without_prefix(setup: Setup, entry: Connector, known: dict[str, Any]) -> Iterator[Line]:
    # vLLM's connector reads some keys without the prefix `lmcache.`, such as `use_layerwise`. These keys are no error.
    tree = setup.packages.tree(f"{VLLM_CONNECTORS}.{READERS[entry.is_v1][1]}")
    own = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)} if tree else set()
    for key in entry.extra:
        if key in own:
            continue
        for full in (f"lmcache.{key}", f"lmcache.mp.{key}"):
            if full in known and not key.startswith("lmcache"):
                yield problem(f"{entry.name} does not read {key!r} of kv_connector_extra_config", f'"{full}": ...')
                break


def _key(setup: Setup, entry: Connector, key: str, value: Any, known: dict[str, Any]) -> Iterator[Line]:
    if key not in known:
        near, wants = nearest(key, known), "LMCacheMPConnector" if entry.is_v1 else "LMCacheConnectorV1"
        other = connector_keys(not entry.is_v1, setup.packages)
        if key in other:
            do = f"remove {key}: only {wants} has it. For options of the LMCache server see lmcache server --help"
        else:
            do = f'"{near}"' if near else f"remove {key}"
        yield problem(f"{entry.name} of {setup.lmcache_title} has no key {key!r}, and ignores it", do)
    elif entry.is_mp and known[key] is not None and _other_type(known[key], value):
        what = f"{key} is {value!r}, but must be a {type(known[key]).__name__}"
        yield problem(what, f'set a valid "{key}"; the default is {known[key]!r}')


def _other_type(default: Any, value: Any) -> bool:
    """Return True if the types differ. Integers, fractions and numbers in quotes count as one type."""
    if isinstance(default, bool):
        return str(value).strip().lower() not in ("1", "0", "true", "false", "yes", "no", "on", "off")
    if isinstance(default, int | float):
        return wrong_type("float", False, value, typed=True)
    return not isinstance(value, str)
