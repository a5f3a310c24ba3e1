"""Check the addresses on which the command listens, and the addresses to which the command connects."""

import re
from collections.abc import Iterator

from kvfix_tools import redact
from kvfix_tools.doctor import servers
from kvfix_tools.doctor.checks import OK, Line, check, ok, problem, remedy, unchecked
from kvfix_tools.doctor.machine import connects, port_in_use, redis_refuses, resolves
from kvfix_tools.doctor.setup import Setup

_ANY = ("0.0.0.0", "::", "*")
#: {first word of an error of Redis (server.c of Redis 7.4): remedy}. KVD874 has the remedy for NOAUTH and MISCONF.
_REFUSALS = {
    "LOADING": "wait until redis-cli ping answers PONG, then start vLLM",
    "READONLY": "set remote_url to the address of the primary (redis-cli info replication: master_host)",
}


@check("listens")
def listens(setup: Setup) -> Iterator[Line]:
    """The ports that this command listens on are free, and no port is used twice."""
    if not setup.command.program or setup.in_container:
        return
    taken: dict[int, str] = {}
    for name, host, port in _own(setup):
        if not 0 < port < 65536:
            yield problem(f"{name} is {port}, which is not a port", f"{name} N, with N from 1 to 65535")
        elif port in taken:
            yield problem(f"{name} and {taken[port]} are both {port}", f"{name} N, with another free port N")
        elif port_in_use(host, port):
            yield problem(f"port {port} ({name}) is in use on this machine", f"{name} N, with another free port N")
        else:
            yield ok(f"port {port} ({name}) is free")
        taken.setdefault(port, name)


def _own(setup: Setup) -> Iterator[tuple[str, str, int]]:
    command = setup.command
    options = {"--port": 8000} if command.serves else {"--port": servers.PORT, "--http-port": servers.HTTP_PORT}
    for option, default in options.items():
        name = option.removeprefix("--")
        value = command.options.get(name, str(default))
        host = command.options.get("host" if name == "port" else "http-host", "")
        if value.isdigit() and not (value == "0" and command.serves):
            yield option, host or ("" if command.serves else "localhost"), int(value)
    if any("Nixl" in each.name for each in setup.connectors):
        value = setup.environment.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")  # vllm/envs.py 0.32.0:234
        if value.isdigit():
            yield "VLLM_NIXL_SIDE_CHANNEL_PORT", "", int(value)
    names = ["p2p_init_ports", "p2p_lookup_ports"] if setup.on("enable_p2p") else []
    if setup.on("enable_pd") and str(setup.setting("pd_role")) == "receiver":
        names += ["pd_peer_init_port", "pd_peer_alloc_port"]
    for name in names if setup.v1 else ():
        for part in setup.several(name):
            if str(part).strip().isdigit() and int(part):
                yield name, "", int(part)


@check("hosts")
def hosts(setup: Setup) -> Iterator[Line]:
    """Hosts that this command connects to can be resolved, are not 0.0.0.0, and have a port."""
    for name, url in _reached(setup):
        shown, at = redact.text(url), servers.address(url)
        if at.host in _ANY:
            what = f"{name} is {shown}: {at.host} is an address to listen on, not to connect to"
            yield problem(what, f"{name}: the host name or IP address of the server")
        elif at.host and not resolves(at.host):
            what = f"{name} is {shown}: this machine cannot resolve {at.host}"
            yield problem(what, f"{name}: a host name that resolves; in Kubernetes SERVICE.NAMESPACE")
        elif at.port is None or not 0 < at.port < 65536:
            yield problem(f"{name} is {shown}, which has no port from 1 to 65535", f"{name}: add the port, HOST:PORT")


def _reached(setup: Setup) -> Iterator[tuple[str, str]]:
    if setup.mp is not None:
        name = "lmcache.mp.server_urls" if "lmcache.mp.server_urls" in setup.mp.extra else "lmcache.mp.host and port"
        yield from ((name, each.url) for each in servers.addresses(setup.mp))
    if setup.v1 is None:
        return
    remote = str(setup.setting("remote_url") or "")
    if remote.startswith(("lm://", "redis://", "rediss://", "valkey://")):
        for part in remote.split(","):
            yield "remote_url", _with_defaults(part)
    if setup.on("enable_pd") and str(setup.setting("pd_role")) == "sender" and setup.setting("pd_proxy_host"):
        yield "pd_proxy_host and port", f"{setup.setting('pd_proxy_host')}:{setup.setting('pd_proxy_port')}"
    if setup.on("enable_controller"):
        for name in ("controller_pull_url", "controller_reply_url"):
            if setup.setting(name):
                yield name, str(setup.setting(name))


def _with_defaults(url: str) -> str:
    """Add the defaults localhost and 6379 to a Redis URL, as Redis's client does (redis/connection.py 8.1.0)."""
    scheme, _, rest = url.partition("://")
    if not scheme.startswith("redis"):
        return url
    at, slash, more = rest.partition("/")
    user, sign, place = at.rpartition("@")
    host, _, port = place.rpartition(":") if re.fullmatch(r".*:\d*", place) else (place, "", "")
    return f"{scheme}://{user}{sign}{host or 'localhost'}:{port or 6379}{slash}{more}"


@check("server")
def server(setup: Setup) -> Iterator[Line]:
    """The LMCache server of the multi-process connector answers on its port, and has the connector's release."""
    if setup.mp is None:
        return
    if servers.autostart(setup.mp):
        yield ok("lmcache.mp.autostart is set: the connector starts the server itself")
        return
    start = "lmcache server --port {} --l1-size-gb 20 --eviction-policy LRU --supported-transfer-mode auto"
    for each in setup.servers:
        if each.address.port is None:
            continue
        if each.why_not:
            what = f"no LMCache server answers at {each.address.url}: {each.why_not}"
            yield problem(what, f"{start.format(each.address.port)}, before vLLM")
            continue
        yield ok(f"a server answers at {each.address.url}")
        own = setup.lmcache.version if setup.lmcache else ""
        if not each.release:
            what = f"the release of the server at {each.address.url}: its HTTP port is unknown or does not answer"
            yield unchecked(what, "kvfix doctor --server-http HOST:PORT -- ..., with the server's --http-port")
        elif own and each.release != own:
            yield problem(
                f"the server at {each.address.url} runs LMCache {each.release}, but the connector runs LMCache {own}. "
                "Messages differ between releases",
                f"pip install lmcache=={own}, where the server runs",
            )
        else:
            yield ok(f"the server at {each.address.url} is LMCache {each.release}")


@check("remote-store")
def remote_store(setup: Setup) -> Iterator[Line]:
    """The store in remote_url (lm, redis or valkey) answers on its port. A Redis store also accepts commands."""
    for name, url in _reached(setup):
        at = servers.address(url)
        if name != "remote_url" or at.port is None or at.host in _ANY or not resolves(at.host):
            continue
        do = "start this store before vLLM, or correct remote_url"
        line = _answers(f"remote_url {redact.text(url)}", at.host, at.port, do)
        if line.status == OK and url.startswith("redis://"):
            why = redis_refuses(at.host, at.port)
            word = why.partition(" ")[0].rstrip(":")
            if word in ("NOAUTH", "MISCONF", *_REFUSALS) and not (word == "NOAUTH" and "@" in url):
                do = _REFUSALS.get(word) or remedy("KVD874")
                line = problem(f"{redact.text(url)} refuses commands: {why[:120]}", do)
        yield line


@check("controller")
def controller(setup: Setup) -> Iterator[Line]:
    """The controller answers at its addresses, if enable_controller is set."""
    for name, url in _reached(setup):
        at = servers.address(url)
        if name.startswith("controller_") and at.host and at.port:
            yield _answers(f"the controller at {name} {at.host}:{at.port}", at.host, at.port, remedy("KVD964"))


def _answers(what: str, host: str, port: int, do: str) -> Line:
    why = connects(host, port)
    return problem(f"{what} does not answer: {why}", do) if why else ok(f"{what} answers")
