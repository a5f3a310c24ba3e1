"""Make logs of real engines with planted faults: `python -m tests.engine.planted_logs FOLDER [NAME ...]`.

Each case of planted_logs.toml starts vLLM's server, mostly with settings that cannot work. The program writes the logs
to FOLDER/NAME, without paths of this host. Without NAME, the program runs the cases that FOLDER does not have yet.
"""

import gzip
import io
import json
import os
import re
import shutil
import signal
import socket
import string
import subprocess
import sys
import tarfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import tomllib
import typer

from kvfix_tools.doctor import checks, command_line, servers
from kvfix_tools.doctor.packages import Packages
from kvfix_tools.doctor.setup import Setup
from kvfix_tools.roundtrip import real_engine
from kvfix_tools.roundtrip.real_engine import prompt
from tests.conftest import ROOT
from tests.diagnose.lines import diagnose_files
from tests.engine import fake_redis, start, vllm_server
from tests.engine.vllm_server import Request, Server

#: ANSWER: maximum seconds for an answer. END: maximum seconds from the signal SIGTERM to the end of the engine.
ANSWER, END = 60, 40
#: The program leaves out these checks of kvfix doctor, because they examine this host, not the settings of a case.
_OF_THE_MACHINE = ("extensions", "gpu", "pinned-memory", "locked-memory", "program")
REQUESTS: list[Request] = [(prompt(300, seed), 6) for seed in range(1, 5)]
#: The kv_transfer_config for each value of `transfer` in planted_logs.toml.
TRANSFERS: dict[str, dict[str, Any]] = {
    "v1": real_engine.in_process(64),
    "mp": {
        "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": "$SERVER",
            "lmcache.mp.mq_timeout": 10,  # with LMCache's default a case would take five minutes
        },
    },
    "nixl": {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"},
    "multi": {"kv_connector": "MultiConnector", "kv_role": "kv_both"},
    "offloading": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
    "offloading on the CPU": vllm_server.OFFLOADING,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A case of planted_logs.toml. The class Run replaces words such as `$FREE` by values of the run."""

    name: str
    truth: str = ""  # the cause in one sentence, written before the first run; "" for a healthy case
    remedy: str = ""
    twin: str = ""  # name of the healthy case with similar settings
    code: str = ""  # the code of kvfix-diagnose's first finding
    setup: bool = True  # kvfix doctor can see the fault before the launch
    transfer: str = "v1"  # a key of TRANSFERS, or a text that is not JSON
    extra: dict[str, Any] | None = None  # replaces the kv_connector_extra_config of `transfer`
    settings: dict[str, Any] = field(default_factory=dict)  # settings of LMCache to add
    keys: dict[str, Any] = field(default_factory=dict)  # more keys of the kv_transfer_config
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    file: str | None = None
    redis: str | None = None  # fault of a fake Redis server that listens at $REDIS
    server: tuple[str, ...] | None = None  # options of an `lmcache server` that listens at $SERVER
    busy: bool = False  # another program already listens at $BUSY
    cache_is_a_file: bool = False  # a file has the path of the folder `cache`
    play: str = "twice"  # method of Run to call while the engine runs
    main: str = "one_engine"  # method of Run to call for the whole case
    second: dict[str, Any] = field(default_factory=dict)  # fields that differ in the second engine
    change: str = ""  # method of Run that changes prefill's kv_transfer_params for decode

    def config(self) -> dict[str, Any] | str:
        if self.transfer not in TRANSFERS:
            return self.transfer
        known = TRANSFERS[self.transfer]
        extra = known.get("kv_connector_extra_config", {}) if self.extra is None else self.extra
        extra = {**extra, **{f"lmcache.{name}": value for name, value in self.settings.items()}}
        if "connectors" in extra:
            extra["connectors"] = [TRANSFERS[each] if isinstance(each, str) else each for each in extra["connectors"]]
        return {**known, **({"kv_connector_extra_config": extra} if extra or self.extra == {} else {}), **self.keys}


CASES = [Case(name, **row) for name, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()]


def ask(server: Server, *requests: Request, **more: Any) -> dict[str, Any]:
    """Send these requests. Return the answer to the last request, or {} if the last request gets no answer."""
    answer: dict[str, Any] = {}
    for request in requests:
        answer = {}
        with suppress(httpx.HTTPError):
            answer = vllm_server.post(server.url, request, ANSWER, **more)
    return answer


def process_named(server: Server, name: str) -> int:
    return int(re.findall(rf"\({name} pid=(\d+)\)", server.log.read_text())[-1])


class Run:
    """One run of a case. values: {word: text}, such as FREE for `$FREE`. warned: problems that kvfix doctor reports."""

    def __init__(self, case: Case, folder: Path, stack: ExitStack) -> None:
        self.case, self.folder = case, folder
        port = str(real_engine.free_port())
        self.values = {"DATA": str(folder / "data"), "FREE": port, "SERVER": port}
        self.logs: dict[str, Path] = {}
        self.warned: list[str] = []
        if case.cache_is_a_file:
            (folder / "data/cache").touch()
        if case.redis is not None:
            self.redis = stack.enter_context(fake_redis.running(case.redis))
            self.values["REDIS"] = str(self.redis.server_address[1])
        if case.busy:
            self.values["BUSY"] = str(stack.enter_context(socket.create_server(("0.0.0.0", 0))).getsockname()[1])
        if case.server is not None and case.main != "server_alone":
            self.logs["server"] = folder / "server.log"
            transfer = stack.enter_context(start.server(log=self.logs["server"], options=tuple(case.server)))
            self.values["SERVER"] = str(transfer["kv_connector_extra_config"]["lmcache.mp.port"])

    @contextmanager
    def running(self, name: str = "engine", **settings: Any) -> Iterator[Server | None]:
        """Yield the running engine, or None if the engine does not start. settings: fields to replace in the case."""
        case = replace(self.case, **settings)
        words = {"KVFIX_TEST_REAL_CONNECTOR": ""}  # "" makes the test plugin replace LMCache's GPU connector
        words |= {name: self.filled(text) for name, text in case.environment.items()}
        if case.file is not None:
            file = self.folder / "lmcache.yaml"
            file.write_text(self.filled(case.file))
            words["LMCACHE_CONFIG_FILE"] = str(file)
        config = case.config()  # the port $SERVER must be an integer in JSON, so the next line removes the quotes
        text = config if isinstance(config, str) else json.dumps(config).replace('"$SERVER"', "$SERVER")
        engine = Server(self.folder / name, self.filled(text), "off", [*map(self.filled, case.options)], **words)
        self.logs[name] = engine.log
        self.doctor(["vllm", "serve", str(self.folder / "model"), *engine.words()], engine.environment)
        with engine.started():
            try:
                engine.until_it_answers()
            except AssertionError:
                yield None
            else:
                yield engine
            if engine.process.poll() is None:  # on SIGTERM the API server ends the whole engine
                os.kill(engine.process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    engine.process.wait(END)

    def doctor(self, words: list[str], environment: Mapping[str, str]) -> None:
        places = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
        setup = Setup(command_line.read(words), environment, Packages([*places, *sys.path]), limit=1)
        for each in checks.catalogue():
            if each.name not in _OF_THE_MACHINE:
                found = [line for line in each.look(setup) if line.status == checks.PROBLEM]
                self.warned += [f"{each.name}: {line.what}" for line in found]

    def filled(self, text: str) -> str:
        return string.Template(text).substitute(self.values)

    def one_engine(self) -> None:
        with self.running() as engine:
            if engine is not None:
                getattr(self, self.case.play)(engine)

    def two_engines(self) -> None:
        """Run two engines, one after the other, with a shared store. Send the same prompts to each engine."""
        second = {**self.case.second, "settings": {**self.case.settings, **self.case.second.get("settings", {})}}
        for name, fields in (("first", {}), ("engine", second)):
            with self.running(name, **fields) as engine:
                if engine is not None:
                    self.twice(engine)

    def server_alone(self) -> None:
        options = tuple(map(self.filled, self.case.server or ()))
        self.logs["engine"] = log = self.folder / "server.log"
        self.doctor(["lmcache", "server", "--l1-size-gb", "0.5", "--eviction-policy", "LRU", *options], os.environ)
        with suppress(RuntimeError), start.server(log=log, options=options):
            pass

    def nixl_pair(self) -> None:
        """Send each request to prefill, then to decode. From request 2 on, `case.change` alters decode's parameters."""
        asks = {"do_remote_decode": True, "do_remote_prefill": False}
        with (
            self.running("prefill", keys={"kv_role": "kv_producer"}) as prefill,
            self.running(keys={"kv_role": "kv_consumer"}) as decode,
        ):
            assert prefill is not None
            assert decode is not None
            for number, (tokens, count) in enumerate(REQUESTS):
                params = ask(prefill, (tokens, 1), kv_transfer_params=asks).get("kv_transfer_params") or {}
                if number and self.case.change:
                    getattr(self, self.case.change)(params, prefill)
                ask(decode, (tokens, count), kv_transfer_params=params)

    def twice(self, engine: Server) -> None:
        """Send four prompts of four or more chunks each. Then reset vLLM's prefix cache and send the prompts again."""
        ask(engine, *REQUESTS)
        with suppress(httpx.HTTPError):
            httpx.post(f"{engine.url}/reset_prefix_cache", timeout=ANSWER)
        ask(engine, *REQUESTS)

    def redis_silent(self, engine: Server) -> None:
        self.redis.fault = "silent"
        self.twice(engine)

    def redis_closes(self, engine: Server) -> None:
        ask(engine, *REQUESTS)
        self.redis.fault = "closes"
        self.twice(engine)

    def disk_deleted(self, engine: Server) -> None:
        self.twice(engine)
        shutil.rmtree(self.folder / "data/cache")
        self.twice(engine)

    def rank_killed(self, engine: Server, name: str = "Worker_TP1") -> None:
        ask(engine, *REQUESTS)
        os.kill(process_named(engine, name), signal.SIGKILL)
        ask(engine, REQUESTS[0])

    def core_killed(self, engine: Server) -> None:
        self.rank_killed(engine, "EngineCore")

    def core_paused(self, engine: Server) -> None:
        ask(engine, *REQUESTS)
        paused(process_named(engine, "EngineCore"), 25, lambda: ask(engine, REQUESTS[0]))
        self.twice(engine)

    def server_paused(self, engine: Server) -> None:
        self.twice(engine)
        pid = next(pid for pid, each in servers.local() if each.options["port"] == self.values["SERVER"])
        paused(pid, 60, lambda: self.twice(engine))

    def wrong_port(self, params: dict[str, Any], prefill: Server) -> None:
        params.update(remote_port=real_engine.free_port(), remote_engine_id="9d3c1f0a-0b6e-4a52-8f0e-1f6f0c4d7a11")

    def prefill_killed(self, params: dict[str, Any], prefill: Server) -> None:
        if prefill.process.poll() is None:
            prefill.kill()
        params.update(remote_request_id=params.get("remote_request_id"))


def paused(pid: int, seconds: float, do: Callable[[], Any]) -> None:
    os.kill(pid, signal.SIGSTOP)
    again = threading.Timer(seconds, os.kill, (pid, signal.SIGCONT))
    again.start()
    do()
    again.join()


def run(case: Case, folder: Path) -> dict[str, Any]:
    shutil.rmtree(folder / case.name, ignore_errors=True)
    here = folder / case.name
    (here / "data").mkdir(parents=True)
    vllm_server.write_model(folder / "model")
    (here / "model").symlink_to(folder / "model")
    with ExitStack() as stack:
        this = Run(case, here, stack)
        getattr(this, case.main)()
    kept = [keep(path, here / f"{case.name}{'' if name == 'engine' else '.' + name}.log.gz", folder)
            for name, path in this.logs.items() if path.exists()]  # fmt: skip
    findings = [each.rule.code for each in diagnose_files(*kept).findings if not each.is_note]
    return {"case": case.name, "expected": case.code, "findings": findings, "doctor": this.warned, "logs": len(kept)}


def keep(log: Path, to: Path, folder: Path) -> Path:
    """Copy the log without the paths and addresses of this host. Return the path of the copy."""
    text = log.read_text(errors="replace")
    here, base = str(to.parent), os.path.realpath(sys.base_prefix)
    for local, neutral in {
        f"{here}/data": "/data", here: "/srv", str(folder): "/srv", here.replace("/", "-"): "-srv",
        f"{ROOT}/.venv/lib/python3.11/site-packages": "/opt/venv/lib", f"{ROOT}/.venv": "/opt/venv",
        str(ROOT): "/opt/src", base: "/usr", sys.base_prefix: "/usr", socket.gethostname(): "host",
        f"{Path.home()}/": "/home/user/",
    }.items():  # fmt: skip
        text = text.replace(local, neutral)
    text = re.sub(r"(?<![\d.])(?!127\.|0\.0\.0\.0)\d+\.\d+\.\d+\.\d+(?=[:, ])", "192.0.2.2", text)
    to.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    return to


def pack(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:xz") as packed:
        for log in sorted(folder.glob("*/*.log.gz")):
            entry = tarfile.TarInfo(f"{log.parent.name}/{log.name.removesuffix('.gz')}")
            content = gzip.decompress(log.read_bytes())
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))


def main(
    folder: Path,
    names: Annotated[list[str] | None, typer.Argument()] = None,
    archive: Annotated[Path | None, typer.Option("--pack", help="run nothing, and put the logs here")] = None,
) -> None:
    """Run the named cases, or all that FOLDER does not have yet. Print what kvfix-diagnose and kvfix doctor find."""
    if archive:
        pack(folder, archive)
    for case in CASES if not archive else ():
        if case.name in (names or ()) or (not names and not (folder / case.name).exists()):
            try:
                print(json.dumps(run(case, folder.absolute())), flush=True)
            except Exception:  # noqa: BLE001  the other cases still run
                print(case.name, traceback.format_exc(), flush=True)


if __name__ == "__main__":
    typer.run(main)
