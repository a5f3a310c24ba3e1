"""Parse a command that starts vLLM or an LMCache server, and the variables that the command sets."""

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePath
from typing import Any, NamedTuple

#: Short names of vLLM's options (vllm/engine/arg_utils.py 0.32.0).
SHORT = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "dcp": "decode-context-parallel-size",
    "pcp": "prefill-context-parallel-size",
    "q": "quantization",
}
_MODULES = {
    "vllm.entrypoints.openai.api_server": "vllm serve",
    "vllm.entrypoints.cli.main": "",
    "lmcache.v1.multiprocess.http_server": "lmcache server",
    "lmcache.v1.multiprocess.server": "lmcache server",
    "lmcache.cli.main": "",
}


class Command(NamedTuple):
    program: str = ""  # such as "vllm serve" or "lmcache server"; "" without a command
    model: str = ""  # "" if not given
    options: dict[str, str] = {}  # {long name without leading dashes: value}, with "" for a switch
    environment: dict[str, str] = {}  # the variables that the command sets
    container: bool = False  # True if the command starts a container (docker run)
    executable: str = ""  # the file that the command runs, such as vllm or python; "" for a container

    @property
    def serves(self) -> bool:
        """True if the command starts an engine, not LMCache's server."""
        return self.program.startswith("vllm")

    def number(self, option: str, default: int) -> int | None:
        """Return the value of an option as a number, or None if the value is not a whole number."""
        value = self.options.get(option) or str(default)
        return int(value) if value.isdigit() else None

    def json(self, option: str) -> dict[str, Any]:
        """Return the JSON object that `--option` and all `--option.key` define. Raise ValueError for a wrong value."""
        value = self.options.get(option)
        loaded = json.loads(value) if value else {}
        if not isinstance(loaded, dict):
            raise ValueError(f"the value is a {type(loaded).__name__}, not an object")
        for name, each in self.options.items():
            first, dot, keys = name.partition(".")
            if dot and first == option:
                with suppress(ValueError):
                    each = json.loads(each)
                _put(loaded, keys.split("."), each)
        return loaded


class Connector(NamedTuple):
    """One connector of the KV-transfer configuration. A MultiConnector and each of its children are connectors."""

    name: str
    role: str
    extra: dict[str, Any]
    module: str  # kv_connector_module_path
    keys: dict[str, Any]  # the whole JSON object of this connector, as the user wrote it

    @property
    def is_v1(self) -> bool:
        """True if the connector runs LMCache in the engine's own process."""
        return self.name.startswith("LMCacheConnector")

    @property
    def is_mp(self) -> bool:
        return self.name.startswith("LMCacheMPConnector")


def connectors(transfer: dict[str, Any]) -> Iterator[Connector]:
    """Yield the connector of a KV-transfer configuration, then the children of a MultiConnector."""
    extra = transfer.get("kv_connector_extra_config")
    extra = extra if isinstance(extra, dict) else {}
    name, role = str(transfer.get("kv_connector") or ""), str(transfer.get("kv_role") or "")
    yield Connector(name, role, extra, str(transfer.get("kv_connector_module_path") or ""), transfer)
    children = extra.get("connectors")
    if name == "MultiConnector" and isinstance(children, list):
        for child in children:
            if isinstance(child, dict):
                yield from connectors(child)


def read(words: list[str]) -> Command | None:
    """Parse a command. Return None for other programs than vLLM and LMCache. Raise ValueError for an unclosed quote."""
    if len(words) == 1 and " " in words[0]:
        words = shlex.split(words[0])
    at, program, after = _program(words)
    if not program:
        return None
    front = words[:at]
    container = any(PurePath(word).name in ("docker", "podman", "nerdctl") for word in front)
    model, options = _options(words[after:], program.startswith("vllm"))
    return Command(program, model, options, _environment(front), container, "" if container else words[at])


def _program(words: list[str]) -> tuple[int, str, int]:
    """Return (index of the program, its name with the subcommand, index of its first argument)."""
    for at, word in enumerate(words):
        name, following = PurePath(word).name, words[at + 1 : at + 2]
        if name in ("vllm", "lmcache") and following and not following[0].startswith("-"):
            return at, f"{name} {following[0]}", at + 2
        if word == "-m" and following and following[0] in _MODULES:
            program, after = _MODULES[following[0]], at + 2
            if not program and after < len(words):
                program, after = f"{following[0].partition('.')[0]} {words[after]}", after + 1
            return max(at - 1, 0), program, after
        if at and not word.startswith("-") and re.search(r"vllm[-/]openai|/vllm(-\w+)*:", word):  # an image of vLLM
            return at, "vllm serve", at + 1
    return 0, "", 0


def _environment(front: list[str]) -> dict[str, str]:
    found = {}
    for at, word in enumerate(front):
        word = re.sub(r"^(-e|--env)=?", "", word)
        match = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL)
        if match and (at == 0 or front[at - 1] not in ("-v", "--volume", "--mount", "-l", "--label")):
            found[match[1]] = match[2]
    return found


def _options(words: list[str], serves: bool) -> tuple[str, dict[str, str]]:
    model, options, at = "", {}, 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("-") or word == "-":
            model = model or word
            continue
        name, equals, value = word.partition("=")
        first, dot, keys = name.lstrip("-").partition(".")  # keep the spelling of the keys of a JSON option
        first = first.replace("_", "-")
        name = SHORT.get(first, first) + dot + keys
        if not equals and at < len(words) and _is_value(words[at], name):
            value = words[at]
            at += 1
        options[name] = value
    return (options.get("model") or model) if serves else "", options


def _is_value(word: str, name: str) -> bool:
    """Return True if `word` is the value of the option `name`. A switch takes only true, false, 0 and 1."""
    is_switch = re.fullmatch(r"(enable|disable|no|enforce|trust|skip|use|async|headless|isolated)-[^.]*", name)
    return not re.match(r"--?[A-Za-z]", word) and (not is_switch or word.lower() in ("true", "false", "0", "1"))


def _put(into: dict[str, Any], keys: list[str], value: Any) -> None:
    # Keys of a connector contain dots, so everything after kv_connector_extra_config is one key.
    if keys[0] == "kv_connector_extra_config" and len(keys) > 1:
        keys = [keys[0], ".".join(keys[1:])]
    for key in keys[:-1]:
        into = into.setdefault(key, {})
    into[keys[-1]] = value
