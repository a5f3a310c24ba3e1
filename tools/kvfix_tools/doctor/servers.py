"""Read facts about LMCache servers from their commands on this machine and from their HTTP APIs (LMCache 0.5.6)."""

import contextlib
import http.client
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from kvfix_tools.doctor import command_line
from kvfix_tools.doctor.command_line import Command, Connector
from kvfix_tools.doctor.machine import connects

PORT, HTTP_PORT = 5555, 8080  # lmcache/v1/multiprocess/config.py 0.5.6: MPServerConfig, HTTPFrontendConfig
#: {name in kvfix's JSON: name in `l1_manager` of `/status`} (lmcache/v1/distributed/l1_manager.py 0.4.5 to 0.5.6).
_L1 = {
    "used_bytes": "memory_used_bytes",
    "total_bytes": "memory_total_bytes",
    "objects": "total_object_count",
    "read_locked": "read_locked_count",
    "write_locked": "write_locked_count",
}


class Address(NamedTuple):
    """An address of a server. url: the address as the user wrote it. port: None if the url has no port."""

    url: str
    host: str
    port: int | None


def addresses(connector: Connector) -> list[Address]:
    """Return the addresses in server_urls, or the address in host and port (lmcache_mp_connector.py 0.5.6:627-648)."""
    urls = connector.extra.get("lmcache.mp.server_urls")
    if isinstance(urls, str):
        urls = urls.split(",")
    if not isinstance(urls, list) or not urls:
        host = connector.extra.get("lmcache.mp.host", "tcp://localhost")
        urls = [f"{host}:{connector.extra.get('lmcache.mp.port', PORT)}"]
    return [address(str(each).strip()) for each in urls if str(each).strip()]


def address(url: str) -> Address:
    scheme, _, rest = url.rpartition("://")
    found = re.fullmatch(r"\[?((?<=\[)[^\]]+|[^:/\[\]]*)\]?:(\d+)(/.*)?", rest.rpartition("@")[2])
    if found is None or scheme == "ipc":
        return Address(url, rest.partition("/")[0].partition(":")[0] if scheme != "ipc" else "", None)
    return Address(url, found[1], int(found[2]))


def autostart(connector: Connector) -> bool:
    """Return True if the connector starts the server itself (lmcache.mp.autostart)."""
    return str(connector.extra.get("lmcache.mp.autostart", "")).lower() in ("true", "1", "yes", "on")


def local() -> Iterator[tuple[int, Command]]:
    """Yield (process id, command) of each `lmcache server` on this machine."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        with contextlib.suppress(ValueError):
            command = command_line.read(words) if any("lmcache" in word for word in words) else None
            if command and command.program == "lmcache server":
                yield process.pid, command


def running(port: int) -> Command | None:
    """Return the command of the `lmcache server` that has this port on this machine, or None."""
    return next((command for _, command in local() if command.number("port", PORT) == port), None)


def http_address(given: str, command: Command | None, host: str) -> tuple[str, int] | None:
    """Return the server's HTTP address from --server-http (`given`) or from the server's command, or None."""
    if given:
        parts = urlsplit(given if "://" in given else f"http://{given}")
        return parts.hostname or "localhost", parts.port or HTTP_PORT
    port = command.number("http-port", HTTP_PORT) if command else None
    return (host or "localhost", port) if port else None


def ask(host: str, port: int, path: str, seconds: float = 3.0) -> Any:
    """Send a GET request. Return the JSON answer, or None if the server sends nothing, an error or no JSON."""
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError), contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return json.loads(answer.read(2**20)) if answer.status == 200 else None
    return None


class Server(NamedTuple):
    """Facts about a server. options: {"chunk_size": ..., "supported_transfer_mode": ...}. release: "" if unknown."""

    address: Address
    why_not: str  # "" if the port answers
    options: dict[str, Any]
    release: str


def inspect(each: Address, http_given: str) -> Server:
    """Connect to a server. If the server answers, read its options and release. http_given: value of --server-http."""
    why_not = "the address has no port" if each.port is None else connects(each.host, each.port)
    if each.port is None or why_not:
        return Server(each, why_not, {}, "")
    command = running(each.port) if each.host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "") else None
    given = command.options if command else {}
    options: dict[str, Any] = {name.replace("-", "_"): value for name, value in given.items()}
    at = http_address(http_given, command, each.host if each.host != "0.0.0.0" else "localhost")
    told, version = (ask(*at, "/config"), ask(*at, "/version")) if at else (None, None)
    for part in told.values() if isinstance(told, dict) else ():
        if isinstance(part, dict) and "chunk_size" in part:
            options.update(part)
    return Server(each, "", options, str(version).partition("-")[0] if isinstance(version, str) else "")


def of(processes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a dictionary for each server of the connectors. Keys: "pid", "port", "answers", "lookups", keys of _L1.

    kvfix does not find servers on other machines or in other containers. lookups: number of unfetched lookup results.
    """
    ports = {port for each in processes for one in each.get("connectors") or () for port in one.get("server_ports", ())}
    mine = [(pid, command) for pid, command in (local() if ports else ()) if command.number("port", PORT) in ports]
    known = [(pid, http_address("", command, "")) for pid, command in mine]
    return [_asked(pid, *at) for pid, at in sorted(known) if at]


def client_of(pid: int) -> int:
    """Return a process id of the engine that the LMCache server `pid` serves, or 0 if `pid` serves no engine."""
    with contextlib.suppress(psutil.Error, OSError):
        connections = psutil.net_connections("tcp")
        ports = {each.laddr.port for each in connections if each.pid == pid and each.status == psutil.CONN_LISTEN}
        served = [each for each in connections if each.status == psutil.CONN_ESTABLISHED and each.raddr]
        clients = {each.pid for each in served if each.raddr.port in ports}
        return min((client for client in clients - {pid, None} if client), default=0)
    return 0


def line(server: dict[str, Any]) -> str:
    head = f"LMCache server ({server['pid']})"
    if not server["answers"]:
        return f"{head}: no answer on its HTTP port {server['port']}"
    if server["used_bytes"] is None:
        return f"{head}: kvfix does not know the format of the server's answer about its L1 cache"
    return (
        f"{head}: L1 {server['used_bytes'] / 2**30:.2f} of {server['total_bytes'] / 2**30:.2f} GiB, "
        f"{server['objects']} objects, {server['read_locked']} read locked, {server['write_locked']} write locked; "
        f"{server['lookups']} lookups whose result was not fetched"
    )


def _asked(pid: int, host: str, port: int) -> dict[str, Any]:
    answer = ask(host, port, "/status", seconds=1.0)
    status = answer if isinstance(answer, dict) else {}
    manager = (status.get("storage_manager") or {}).get("l1_manager") or {}
    return {
        "pid": pid,
        "port": port,
        "answers": bool(status),
        "lookups": status.get("active_prefetch_jobs"),
        **{name: manager.get(theirs) for name, theirs in _L1.items()},
    }
