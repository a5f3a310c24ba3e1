"""Read settings and server options from the source of the installed LMCache, because releases use different names."""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple

from kvfix_tools.doctor.packages import Package, Packages, assigned, compared, constant, defined, parse

#: {type of a setting: name of the type in reports}. kvfix does not check values of other types.
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list[int]": "a list of whole numbers",
    "list[float]": "a list of numbers",
    "list[str]": "a list of text",
    "dict": "a mapping",
}
#: LMCache's modules and vLLM's module that read `lmcache.*` keys. True: LMCacheConnectorV1. False: the MP connector.
READERS = {
    True: (("vllm_v1_adapter", "lmcache_connector_v1"), "lmcache_connector"),
    False: (
        ("lmcache_mp_connector", "lmcache_mp_metadata", "mp_server_launcher", "vllm_multi_process_adapter"),
        "lmcache_mp_connector",
    ),
}
VLLM_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
_KEY = re.compile(r"lmcache\.[a-z_.]*[a-z]")
#: For each setting that allows only certain words: the module, and the table or function that lists the words.
_WORDS = {
    "cache_policy": ("lmcache.v1.storage_backend.cache_policy", "POLICY_MAPPING"),
    "remote_serde": ("lmcache.v1.storage_backend.naive_serde", "CreateSerde"),
    "pre_caching_hash_algorithm": ("vllm.utils.hashing", "get_hash_fn_by_name"),
}


class Definition(NamedTuple):
    """A setting. kind: usually a key of KINDS. converted: True if LMCache converts environment variables to `kind`."""

    name: str
    kind: str
    optional: bool
    default: Any
    converted: bool = True


class Definitions(NamedTuple):
    """The settings of one release. aliases: {old name: new name}. deprecated: {name: LMCache's message}."""

    known: dict[str, Definition] = {}
    aliases: dict[str, str] = {}
    deprecated: dict[str, str] = {}

    def default(self, name: str) -> Any:
        """Return the default of a setting, or None for an unknown name."""
        return self.known[name].default if name in self.known else None

    def is_read(self, name: str) -> bool:
        """Return True if the release reads this name from a file or the environment.

        An alias counts only if the release lists the alias as deprecated. If not, LMCache warns about an unknown key
        and ignores the alias (config_base.py 0.5.6:184-212).
        """
        return name in self.known or (name in self.deprecated and self.aliases.get(name) in self.known)


@lru_cache(maxsize=4)
def read(lmcache: Package) -> Definitions:
    tree = lmcache.tree("lmcache.v1.config")
    table = assigned(tree, "_CONFIG_DEFINITIONS")
    if not isinstance(table, ast.Dict):
        return Definitions()
    rows = ((constant(key), value) for key, value in zip(table.keys, table.values, strict=True))
    known = {name: _definition(name, value) for name, value in rows if name and isinstance(value, ast.Dict)}
    aliases, deprecated = (constant(assigned(tree, each)) or {} for each in ("_CONFIG_ALIASES", "_DEPRECATED_CONFIGS"))
    return Definitions(known, aliases, deprecated)


def _definition(name: str, node: ast.Dict) -> Definition:
    parts = {constant(key): value for key, value in zip(node.keys, node.values, strict=True)}
    written = ast.unparse(parts["type"]).replace(" ", "").replace("List", "list").replace("Dict", "dict")
    found = re.fullmatch(r"Optional\[(.+)\]", written)
    default = parts.get("default")
    if isinstance(default, ast.Call) and ast.unparse(default) == "float('inf')":
        return Definition(name, "float", False, float("inf"))
    return Definition(name, found[1] if found else written, bool(found), constant(default), "env_converter" in parts)


def words(name: str, packages: Packages) -> set[str]:
    """Return the words that a setting allows. Return an empty set if all words are allowed, or unknown."""
    module, holder = _WORDS.get(name, ("", ""))
    tree = packages.tree(module) if module else None
    table, function = assigned(tree, holder), defined(tree, holder)
    if isinstance(table, ast.Dict):
        return {str(constant(key)) for key in table.keys}
    found = {str(constant(each.comparators[0])) for each in compared(function) if isinstance(each.ops[0], ast.Eq)}
    of_lmcache = {"builtin", "sha256_cbor_64bit"}  # LMCache adds both to vLLM's words (token_database.py 0.5.6:126-188)
    return found | of_lmcache if found and module.startswith("vllm") else found


def connector_keys(is_v1: bool, packages: Packages) -> dict[str, Any]:
    """Return {key `lmcache.*`: default or None} for keys that the connector reads. Skip unreadable modules."""
    modules, own = READERS[is_v1]
    names = [*(f"lmcache.integration.vllm.{module}" for module in modules), f"{VLLM_CONNECTORS}.{own}"]
    keys: dict[str, Any] = {}
    for tree in filter(None, map(packages.tree, names)):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _KEY.fullmatch(node.value):
                keys.setdefault(node.value, None)
            elif isinstance(node, ast.Call) and len(node.args) == 2:
                name = constant(node.args[0])
                if isinstance(name, str) and _KEY.fullmatch(name):
                    keys[name] = constant(node.args[1])
        for each in getattr(defined(tree, "ExtraConfigDefault"), "body", ()):
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
                keys[f"lmcache.mp.{each.targets[0].id}"] = constant(each.value)
    if is_v1 and (lmcache := packages.get("lmcache")):
        keys.update({f"lmcache.{name}": each.default for name, each in read(lmcache).known.items()})
    return keys


class Option(NamedTuple):
    """An option. default: None without a default, or if kvfix cannot read the default. choices: () for any value."""

    default: Any
    choices: tuple[str, ...]
    required: bool


@lru_cache(maxsize=4)
def server_options(lmcache: Package) -> dict[str, Option]:
    """Return {name of an option, such as "--chunk-size": Option}, or {} if this release has no `lmcache server`."""
    if lmcache.file("lmcache.cli.commands.server") is None:
        return {}
    found: dict[str, Option] = {}
    for place in ("v1/multiprocess", "v1/distributed", "v1/mp_observability", "cli/commands"):
        for file in sorted((lmcache.folder / place).rglob("*.py")):
            is_other = place == "cli/commands" and file.name not in ("server.py", "base.py")
            if is_other or b"add_argument(" not in file.read_bytes():  # skip the slow parsing
                continue
            tree = parse(file)
            for name, option in _arguments(tree) if tree else ():
                found.setdefault(name, option)
    return found


def _arguments(tree: ast.Module) -> Iterator[tuple[str, Option]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(".add_argument"):
            continue
        given = {each.arg: each.value for each in node.keywords}
        choices = constant(given.get("choices"))
        option = Option(
            constant(given.get("default")),
            tuple(str(each) for each in choices) if isinstance(choices, list | tuple) else (),
            constant(given.get("required")) is True,
        )
        for argument in node.args:
            name = constant(argument)
            if isinstance(name, str) and name.startswith("--"):
                yield name, option
                if "BooleanOptionalAction" in ast.unparse(given["action"]) if "action" in given else False:
                    yield f"--no-{name.removeprefix('--')}", option


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar to `name`, or "" if no known name is similar."""
    close = get_close_matches(name.lower(), list(known), n=1, cutoff=0.7)
    return close[0] if close else ""


def wrong_type(kind: str, optional: bool, value: Any, typed: bool) -> bool:
    """Return True if LMCache cannot use the value. typed: True for YAML and JSON, False for an environment variable."""
    if value is None:
        return not optional
    if kind in ("str", "list[str]"):
        return kind == "str" and typed and isinstance(value, dict | list)
    if kind == "bool":  # LMCache's _to_bool silently reads everything except true and 1 as false.
        return str(value).strip().lower() not in ("true", "false", "1", "0")
    if isinstance(value, bool):
        return True
    try:
        if kind == "dict":  # LMCache expects JSON in an environment variable (config.py 0.5.6:382)
            return not isinstance(json.loads(value or "{}") if isinstance(value, str) else value, dict)
        items = [value]
        if kind.startswith("list"):
            items = value if isinstance(value, list) else [part for part in str(value).split(",") if part.strip()]
        for each in items:
            if "int" in kind and isinstance(each, float) and not each.is_integer():
                return True
            (int if "int" in kind else float)(each)
    except (ValueError, TypeError):
        return True
    return False
