"""The LMCache servers of an engine on this machine, and the state of their L1 from their HTTP interface."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import psutil

from kvfix_tools.doctor import servers

PATIENCE = 1.0  # time limit of an HTTP answer in seconds
#: {name in kvfix's answer: name in l1_manager of `/status`} (lmcache/v1/distributed/l1_manager.py 0.4.5 to 0.5.6).
_L1 = {
    "used_bytes": "memory_used_bytes",
    "total_bytes": "memory_total_bytes",
    "objects": "total_object_count",
    "read_locked": "read_locked_count",
    "write_locked": "write_locked_count",
}


def of(processes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return [{"pid", "port", "answers", "lookups", and the names of _L1}] of the servers that the connectors name.

    Servers on another machine or in another container are not found. lookups: lookups whose result nobody has fetched.
    """
    ports = {port for each in processes for one in each.get("connectors") or () for port in one.get("server_ports", ())}
    local = servers.local() if ports else ()
    mine = [(pid, command) for pid, command in local if command.number("port", servers.PORT) in ports]
    known = [(pid, servers.http_address("", command, "")) for pid, command in mine]
    return [_asked(pid, *at) for pid, at in sorted(known) if at]


def client_of(pid: int) -> int:
    """Return a process of the engine that this LMCache server serves; 0 if it serves none or is not a server."""
    with suppress(psutil.Error, OSError):
        connections = psutil.net_connections("tcp")
        ports = {each.laddr.port for each in connections if each.pid == pid and each.status == psutil.CONN_LISTEN}
        clients = {
            each.pid
            for each in connections
            if each.status == psutil.CONN_ESTABLISHED and each.raddr and each.raddr.port in ports
        }
        return min((client for client in clients - {pid, None} if client), default=0)
    return 0


def line(server: dict[str, Any]) -> str:
    head = f"LMCache server ({server['pid']})"
    if not server["answers"]:
        return f"{head}: no answer on its HTTP port {server['port']}"
    if server["used_bytes"] is None:
        return f"{head}: kvfix does not know the format of its answer about L1"
    return (
        f"{head}: L1 {server['used_bytes'] / 2**30:.2f} of {server['total_bytes'] / 2**30:.2f} GiB, "
        f"{server['objects']} objects, {server['read_locked']} read locked, {server['write_locked']} write locked; "
        f"{server['lookups']} lookups whose result was not fetched"
    )


def _asked(pid: int, host: str, port: int) -> dict[str, Any]:
    answer = servers.ask(host, port, "/status", PATIENCE)
    status = answer if isinstance(answer, dict) else {}
    manager = (status.get("storage_manager") or {}).get("l1_manager") or {}
    return {
        "pid": pid,
        "port": port,
        "answers": bool(status),
        "lookups": status.get("active_prefetch_jobs"),
        **{name: manager.get(theirs) for name, theirs in _L1.items()},
    }
