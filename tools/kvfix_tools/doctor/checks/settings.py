"""Check LMCache's settings in its YAML file, in variables LMCACHE_* and in the keys of the connector."""

import json
import math
from collections.abc import Iterator
from typing import Any

from kvfix_tools import redact
from kvfix_tools.doctor.checks import Line, check, ok, problem, unchecked
from kvfix_tools.doctor.definitions import KINDS, nearest, words, wrong_type
from kvfix_tools.doctor.setup import ENVIRONMENT, FILE, TRANSFER, Setting, Setup

#: {setting: (minimum, maximum, unit)}, as LMCache 0.5.6 describes or uses the setting. LMCache checks few ranges.
_RANGES: dict[str, tuple[float, float, str]] = {
    "chunk_size": (1, math.inf, "tokens"),
    "max_local_cpu_size": (0, math.inf, "GiB for each worker"),
    "reserve_local_cpu_size": (0, math.inf, "GiB"),
    "max_local_disk_size": (0, math.inf, "GiB"),
    "min_retrieve_tokens": (0, math.inf, "tokens"),
    "lookup_timeout_ms": (1, math.inf, "milliseconds"),
    "blocking_timeout_secs": (1, math.inf, "seconds"),
    "pin_timeout_sec": (1, math.inf, "seconds"),
    "pin_check_interval_sec": (1, math.inf, "seconds"),
    "lazy_memory_initial_ratio": (0, 1, "a part of the memory"),
    "lazy_memory_expand_trigger_ratio": (0, 1, "a part of the memory"),
    "lazy_memory_step_ratio": (0, 1, "a part of the memory"),
    "pd_buffer_size": (1, math.inf, "bytes"),
    "nixl_buffer_size": (1, math.inf, "bytes"),
}


@check("config-file", essential=True)
def file(setup: Setup) -> Iterator[Line]:
    """The file LMCACHE_CONFIG_FILE exists, and is a mapping in YAML."""
    path, content, why = setup.config_file
    if not path:
        return
    if why.startswith("PyYAML"):
        yield unchecked(f"LMCACHE_CONFIG_FILE {path}: {why}")
    elif why:
        yield problem(f"LMCACHE_CONFIG_FILE {path}: {why}", "correct the path, or write one `name: value` in each line")
    else:
        yield ok(f"LMCACHE_CONFIG_FILE {path}: {len(content)} settings")


@check("setting-names", essential=True)
def names(setup: Setup) -> Iterator[Line]:
    """The installed LMCache knows every setting in the file and every LMCACHE_* variable."""
    if not setup.settings and not setup.lmcache_variables():
        return
    known = setup.definitions
    if not known.known:
        yield unchecked("the names of settings were not checked: LMCache is not installed here, or is too old")
        return
    title, faults = setup.lmcache_title, list[Line]()
    for each in setup.settings:
        if each.source == TRANSFER or known.is_read(each.name) or each.name.startswith("ec"):
            continue  # another part of LMCache reads `ec` and `ec_...` (config.py 0.5.6)
        new = known.aliases.get(each.name) or nearest(each.name, known.known)
        what = f"{title} has no setting {each.spelled!r} ({each.source}), and ignores it"
        faults.append(problem(what, _instead(each, new)))
    for variable in setup.lmcache_variables():
        name = variable.removeprefix("LMCACHE_").lower()
        is_known = name in known.known or name.removeprefix("ec_") in known.known or name in known.aliases
        if is_known or _occurs(variable, setup):
            continue
        near = nearest(name, known.known)
        do = f"LMCACHE_{near.upper()}" if near else f"unset {variable}"
        faults.append(problem(f"{title} reads no variable {variable}", do))
    yield from faults or [ok(f"{title} knows the names of all {len(setup.settings)} settings")]


def _instead(each: Setting, name: str) -> str:
    if not name:
        return f"unset {each.spelled}" if each.source == ENVIRONMENT else f"remove {each.spelled} from {each.source}"
    return f"LMCACHE_{name.upper()}={_shown(each)}" if each.source == ENVIRONMENT else f"{name}: {_shown(each)}"


def _occurs(variable: str, setup: Setup) -> bool:
    """Return True if the name of the variable occurs in the source of LMCache or of vLLM's connectors."""
    folders = [setup.lmcache.folder] if setup.lmcache else []
    folders += [setup.vllm.folder / "distributed/kv_transfer"] if setup.vllm else []
    sources = (source for folder in folders for source in folder.rglob("*.py"))
    return any(variable in source.read_text(encoding="utf-8", errors="replace") for source in sources)


@check("setting-values")
def values(setup: Setup) -> Iterator[Line]:
    """The values of settings have the type that the installed LMCache defines, and are in range."""
    known = setup.definitions
    if not known.known or not setup.settings:
        return
    faults = []
    for each in setup.settings:
        name = each.name if each.name in known.known else known.aliases.get(each.name, "")
        definition = known.known.get(name)
        if definition is None or definition.kind not in KINDS:
            continue
        if wrong_type(definition.kind, definition.optional, each.value, each.source != ENVIRONMENT):
            what = f"{each.spelled} is {_shown(each)} ({each.source}), but must be {KINDS[definition.kind]}"
            if each.source == FILE:
                do = f"set a valid {each.spelled}; the default is {definition.default!r}"
            elif definition.default is None:
                do = f"unset {each.spelled}: by default it has no value"
            else:
                do = f"set a valid {each.spelled}; the default is {definition.default}"
            faults.append(problem(what, do))
        else:
            faults += [*_range(name, each), *_word(setup, name, each)]
    size = setup.number("max_local_disk_size")
    if setup.setting("local_disk") and size is not None and size <= 0:
        what = "local_disk is set, but max_local_disk_size is 0, so no chunk is stored on disk"
        faults.append(problem(what, "max_local_disk_size: 100"))
    yield from faults or [ok(f"the values of all {len(setup.settings)} settings have the right type")]


def _range(name: str, each: Setting) -> Iterator[Line]:
    low, high, unit = _RANGES.get(name, (-math.inf, math.inf, ""))
    if name.endswith(("_port", "_ports")):
        low, high, unit = 0, 65535, "a port"
    for item in each.value if isinstance(each.value, list) else str(each.value).split(","):
        try:
            number = float(item)
        except (TypeError, ValueError):
            continue
        if not low <= number <= high:
            upper = f" to {high:g}" if high < math.inf else " or more"
            what = f"{each.spelled} is {item} ({each.source}), which is out of range"
            yield problem(what, f"{each.spelled}: {low:g}{upper} ({unit})")


def _word(setup: Setup, name: str, each: Setting) -> Iterator[Line]:
    known = words(name, setup.packages)
    # LMCache also accepts the name of a policy in lower case (cache_policy/__init__.py 0.5.6:37).
    value = str(each.value).upper() if name == "cache_policy" else str(each.value)
    if known and each.value is not None and value not in known:
        near = nearest(value, {word.lower(): word for word in known})
        do = next((word for word in known if word.lower() == near), "") or ", ".join(sorted(known))
        yield problem(f"{each.spelled} is {each.value} ({each.source}), but LMCache does not know this value", do)


@check("set-twice")
def twice(setup: Setup) -> Iterator[Line]:
    """No setting has different values in the file, the environment and --kv-transfer-config. The last source wins."""
    found: dict[str, list[Setting]] = {}
    for each in setup.settings:
        found.setdefault(setup.current(each.name), []).append(each)
    for name, several in found.items():
        if len({_plain(each.value) for each in several}) > 1:
            listed = ", ".join(f"{each.spelled} is {_shown(each)} in {each.source}" for each in several)
            what = f"{name} has different values: {listed}. The last value wins"
            yield problem(what, f"set {name} in one place only")


def _plain(value: Any) -> str:
    """Return the same text for equal values, such as `true`, True and "True", or 256, 256.0 and "256"."""
    text = json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else str(value).strip().lower()
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


@check("deprecated")
def deprecated(setup: Setup) -> Iterator[Line]:
    """No setting has a name that is deprecated in the installed LMCache."""
    known = setup.definitions
    for each in setup.settings:
        if each.name in known.deprecated and known.is_read(each.name):
            new = known.aliases.get(each.name, "")
            yield problem(f"{each.spelled} ({each.source}): {known.deprecated[each.name]}", _instead(each, new))


@check("environment-converted")
def converted(setup: Setup) -> Iterator[Line]:
    """If LMCACHE_CONFIG_FILE is set, LMCache can convert each LMCACHE_* variable to the setting's type. See KVD900."""
    for each in setup.settings if setup.config_file[0] else ():
        definition = setup.definitions.known.get(each.name)
        if each.source == ENVIRONMENT and definition is not None and not definition.converted:
            yield problem(
                f"{each.spelled} stops LMCache at its start: this release cannot convert the variable if "
                "LMCACHE_CONFIG_FILE is also set",
                f"unset {each.spelled}, and write {each.name}: {_shown(each)} into the file",
            )


@check("settings-read")
def who_reads(setup: Setup) -> Iterator[Line]:
    """If the engine uses only the multi-process connector, no setting of the in-process connector is set."""
    unread = sorted(each.spelled for each in setup.settings if each.name in setup.definitions.known)
    if setup.mp and not setup.v1 and unread:
        what = f"{setup.mp.name} does not read {', '.join(unread)}, which only the in-process connector reads"
        do = "lmcache server --chunk-size N --l1-size-gb N ...: set the options of the server (lmcache server --help)"
        yield problem(what, do)


@check("server-options")
def server_options_known(setup: Setup) -> Iterator[Line]:
    """The installed LMCache knows every option of an `lmcache server` command, and no required option is missing."""
    command, known = setup.command, setup.server_options
    if not setup.is_server:
        return
    if not known:
        yield unchecked("the options were not checked: LMCache is not installed here, or has no `lmcache server`")
        return
    faults = []
    for name, value in command.options.items():
        option = known.get(f"--{name}")
        if option is None:
            do = nearest(f"--{name}", known) or "lmcache server --help"
            faults.append(problem(f"lmcache server of {setup.lmcache_title} has no option --{name}", do))
        elif option.choices and value not in option.choices:
            do = f"--{name} {' | '.join(option.choices)}"
            faults.append(problem(f"--{name} is {value!r}, which is not allowed", do))
    for name, option in known.items():
        if option.required and name.removeprefix("--") not in command.options:
            do = f"{name} {' | '.join(option.choices) or 'VALUE'}"
            faults.append(problem(f"lmcache server needs {name}", do))
    yield from faults or [ok(f"{setup.lmcache_title} knows all {len(command.options)} options")]


def _shown(each: Setting) -> str:
    return redact.setting(each.name, str(each.value))
