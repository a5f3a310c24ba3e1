"""The set-up that the checks read: releases, command, KV-transfer configuration, settings, environment, model."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kvfix_tools.doctor import command_line, definitions, extensions, servers
from kvfix_tools.doctor.command_line import Command, Connector
from kvfix_tools.doctor.definitions import Definitions, Option
from kvfix_tools.doctor.machine import Machine
from kvfix_tools.doctor.packages import Packages, assigned, constant

#: {library that transfers KV: the module to import}
TRANSFER_MODULES = {"nixl": "nixl._api", "mooncake": "mooncake.engine"}
OPERATIONS = ("cuda_ops", "c_ops")  # the compiled operations of LMCache: `cuda_ops` from 0.5.4 on, `c_ops` before
_FOR_PROCESSORS = {"_C", "_C_AVX512", "_C_AVX2"}  # builds of vLLM's operations for the CPU. vLLM loads one of them
FILE, ENVIRONMENT, TRANSFER = "LMCACHE_CONFIG_FILE", "the environment", "--kv-transfer-config"
#: Variables that Kubernetes sets for a service called lmcache-...
_OF_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)$|_PORT=tcp://")


class Setting(NamedTuple):
    """A setting of LMCache. spelled: the name as the user wrote it. source: FILE, ENVIRONMENT or TRANSFER."""

    name: str
    spelled: str
    value: Any
    source: str


def _for_processor(files: list[Path], flags: set[str]) -> str:
    """Return the library that vLLM loads (vllm/platforms/cpu.py 0.32.0:633-665). Some wheels of vLLM have only `_C`."""
    built = {file.name.partition(".")[0] for file in files}
    if "_C_AVX2" not in built or not flags:  # built for a GPU, or for a processor other than x86
        return "_C"
    if not flags >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}:
        return "_C_AVX2"
    return "_C_AVX512" if "_C_AVX512" in built and "avx512_bf16" not in flags else "_C"


class Setup:
    def __init__(
        self,
        command: Command | None,
        environment: Mapping[str, str],
        packages: Packages | None = None,
        machine: Machine | None = None,
        limit: float = extensions.LIMIT,
        server_http: str = "",
    ) -> None:
        """environment: this process's variables, unused if the command starts a container. The command's variables win.

        limit: seconds for loading the compiled extensions. server_http: address of the LMCache server's HTTP port.
        """
        self.command = command or Command()
        self.in_container = self.command.container  # kvfix cannot look into the container
        self.is_server = self.command.program == "lmcache server"
        self.environment = {**({} if self.in_container else environment), **self.command.environment}
        self.packages = packages or Packages([] if self.in_container else None)
        self.vllm, self.lmcache = self.packages.get("vllm"), self.packages.get("lmcache")
        self.vllm_title = self.vllm.title if self.vllm else "vLLM"
        self.lmcache_title = self.lmcache.title if self.lmcache else "LMCache"
        self.machine = machine or Machine()
        self.server_http = server_http
        self._limit = limit

    @cached_property
    def definitions(self) -> Definitions:
        return definitions.read(self.lmcache) if self.lmcache else Definitions()

    @cached_property
    def server_options(self) -> dict[str, Option]:
        return definitions.server_options(self.lmcache) if self.lmcache else {}

    def option(self, name: str, default: str = "") -> str:
        return self.command.options.get(name, default)

    def has_option(self, name: str) -> bool:
        return name in self.command.options

    @cached_property
    def transfer(self) -> tuple[dict[str, Any], str]:
        """(value of --kv-transfer-config, error). The value is {} if the option is missing or cannot be read."""
        if not self.command.serves:
            return {}, ""
        try:
            return self.command.json("kv-transfer-config"), ""
        except (ValueError, AttributeError, TypeError) as error:
            return {}, str(error)

    @cached_property
    def connectors(self) -> list[Connector]:
        return list(command_line.connectors(self.transfer[0])) if self.transfer[0] else []

    @property
    def lmcache_connectors(self) -> list[Connector]:
        return [each for each in self.connectors if each.is_v1 or each.is_mp]

    @property
    def v1(self) -> Connector | None:
        """The first connector that runs LMCache in the engine's own process."""
        return next((each for each in self.connectors if each.is_v1), None)

    @property
    def mp(self) -> Connector | None:
        """The first multi-process connector of LMCache."""
        return next((each for each in self.connectors if each.is_mp), None)

    @cached_property
    def servers(self) -> list[servers.Server]:
        if self.mp is None or servers.autostart(self.mp):
            return []
        return [servers.inspect(each, self.server_http) for each in servers.addresses(self.mp)]

    @cached_property
    def config_file(self) -> tuple[str, dict[str, Any], str]:
        """(path, content, error) of the file in LMCACHE_CONFIG_FILE. The path is "" if the variable is not set."""
        path = self.environment.get("LMCACHE_CONFIG_FILE", "")
        if not path:
            return "", {}, ""
        try:
            import yaml  # type: ignore[import-untyped]  # LMCache depends on PyYAML
        except ImportError:
            return path, {}, "PyYAML is not installed for this Python"
        try:
            loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            return path, {}, " ".join(str(getattr(error, "strerror", None) or error).split())
        if not isinstance(loaded, dict):
            return path, {}, f"the file is a {type(loaded).__name__}, not a mapping of settings"
        return path, {str(key): value for key, value in loaded.items()}, ""

    @cached_property
    def settings(self) -> list[Setting]:
        """Settings of the in-process connector, without unknown variables. For each name, the last setting counts."""
        found = [Setting(name, name, value, FILE) for name, value in self.config_file[1].items()]
        for name in (*self.definitions.known, *self.definitions.aliases):
            spelled = f"LMCACHE_{name.upper()}"
            if spelled in self.environment:
                value = self.environment[spelled].strip()
                quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
                found.append(Setting(name, spelled, value[1:-1] if quoted else value, ENVIRONMENT))
        for key, value in (self.v1.extra if self.v1 else {}).items():
            if key.startswith("lmcache."):
                found.append(Setting(key.removeprefix("lmcache."), key, value, TRANSFER))
        return found

    def lmcache_variables(self) -> list[str]:
        names = (name for name in self.environment if name.startswith("LMCACHE_"))
        own = (name for name in names if not _OF_KUBERNETES.search(name))
        return sorted(name for name in own if not _OF_KUBERNETES.search(f"{name}={self.environment[name]}"))

    def setting(self, name: str) -> Any:
        """Return the effective value of a setting, or its default in the installed release, or None."""
        values = [each.value for each in self.settings if self.current(each.name) == name]
        value = values[-1] if values else None
        return self.definitions.default(name) if value is None else value

    def several(self, name: str) -> list[Any]:
        """Return the items of a setting whose value is a list, or a text with commas."""
        value = self.setting(name)
        text = "" if value is None else str(value)
        return value if isinstance(value, list) else [part for part in text.split(",") if part.strip()]

    def number(self, name: str) -> float | None:
        """Return a setting as a number, or None if its value is not a number."""
        try:
            return float(self.setting(name))
        except (TypeError, ValueError):
            return None

    def on(self, name: str) -> bool:
        """Return True if LMCache reads the setting as true (config_base.py 0.5.6, _to_bool)."""
        return str(self.setting(name)).strip().lower() in ("true", "1")

    def current(self, name: str) -> str:
        """Return the new name of a deprecated setting, and every other name unchanged."""
        is_old = name not in self.definitions.known and self.definitions.is_read(name)
        return self.definitions.aliases[name] if is_old else name

    def parallel(self, which: str) -> int:
        """Return the tensor, pipeline, data or decode-context parallel size. The default is 1."""
        return self.command.number(f"{which}-parallel-size", 1) or 1

    @property
    def ranks(self) -> int:
        return self.parallel("tensor") * self.parallel("pipeline")

    @cached_property
    def model(self) -> dict[str, Any]:
        """The model's config.json, or {} without this file. In a multi-modal model, the values in `text_config` win."""
        name = "" if self.in_container else self.command.model
        for file in self._model_files(name) if name else ():
            try:
                loaded = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if isinstance(loaded, dict):
                text = loaded.get("text_config")
                return {**loaded, **text} if isinstance(text, dict) else loaded
        return {}

    def _model_files(self, name: str) -> Iterator[Path]:
        yield Path(name, "config.json")
        home = Path(self.environment.get("HF_HOME") or Path.home() / ".cache/huggingface")
        hub = Path(self.environment.get("HF_HUB_CACHE") or home / "hub", "models--" + name.replace("/", "--"))
        yield from sorted(hub.glob("snapshots/*/config.json"))

    @property
    def on_cpu(self) -> bool:
        """True if the installed torch is built for the CPU only. False also if kvfix cannot find out."""
        tree = self.packages.tree("torch.version")
        named = [assigned(tree, name) for name in ("cuda", "hip", "xpu")]
        return named[0] is not None and not any(constant(each) for each in named)

    @cached_property
    def tried(self) -> extensions.Tried:
        """The result of loading `libraries` and the transfer modules that the connectors need."""
        modules = [each for name, each in TRANSFER_MODULES.items() if self.needs(name) and self.packages.get(name)]
        return extensions.attempt(self.packages.places or [], self.libraries, modules, self._limit)

    @property
    def libraries(self) -> list[Path]:
        """The compiled operations that LMCache and vLLM load on this processor."""
        found: list[Path] = []
        if self.lmcache:
            found += [file for name in OPERATIONS for file in sorted(self.lmcache.folder.glob(f"{name}.*so"))]
        if self.vllm:
            files = sorted(self.vllm.folder.glob("_C*.so"))
            others = _FOR_PROCESSORS - {_for_processor(files, self.machine.processor_flags())}
            found += [file for file in files if file.name.partition(".")[0] not in others]
        return found

    def needs(self, transport: str) -> bool:
        """Return True if a connector moves KV with this library, nixl or mooncake."""
        if any(transport in each.name.lower() for each in self.connectors):
            return True
        channel = str(self.setting("transfer_channel") or "").lower()
        uses = self.v1 is not None and (self.on("enable_pd") or self.on("enable_p2p"))
        remote = str(self.setting("remote_url") or "")
        return (uses and (channel or "nixl") == transport) or remote.startswith(f"{transport}store")
