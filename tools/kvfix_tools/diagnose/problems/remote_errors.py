"""What a remote store of the in-process connector answers: the error after the colon, whatever LMCache was doing."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Logged, Problem
from kvfix_tools.diagnose.signs import Sign

_LMCACHE = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
#: Statements that end with the error of a store.
_START = ("Failed to initialize/re-establish remote connection: ",)
_SAYS = (
    *_START,
    "Remote connection failed in contains: ",
    "Remote connection failed in batched_contains: ",
    "lm connector failed in exists: ",
    "Put task failed for key <key>: ",
    "batched put error: ",
    "Error occurred in get_blocking: ",
    "Error occurred in batched_get_blocking: ",
    "Error occurred in batched_async_contains: ",
    "Error occurred in batched_get_non_blocking: ",
)


def _answered(*errors: str, says: tuple[str, ...] = _SAYS) -> tuple[Sign, ...]:
    """Any of the errors, at the end of any of the statements: alone, or after what a client puts before it."""
    return tuple(Logged(f"{said}{lead}{error}") for said in says for error in errors for lead in ("", "<lead>"))


PROBLEMS = (
    Problem(
        code="KVD1042",
        name="remote-store-is-down",
        severity=Severity.SLOW,
        title="Nothing listens at the address of the remote store.",
        shows=_answered("Connection refused", "Connect call failed", "Error 111 connecting to"),
        sentence="the store's address refuses the connection",
        connectors=_IN_PROCESS,
        cause="The machine of remote_url answers, and no store has that port there: it is not up yet, has ended, has "
        "another port, or listens on 127.0.0.1 only. `localhost` in remote_url is the worker's own container.",
        now="from the worker's container `nc -vz HOST PORT` of remote_url; start the store, bound to 0.0.0.0 "
        "(redis-server --bind 0.0.0.0), or name its service: LMCACHE_REMOTE_URL=redis://HOST:6379. LMCache tries again "
        "by itself; an lm:// connection that was up before needs a restart of vLLM",
        good="keep it so: the set-up was wrong, and no release changes that",
        threads=(_LMCACHE + "issues/2581",),
    ),
    Problem(
        code="KVD1044",
        name="remote-store-name-not-known",
        severity=Severity.SLOW,
        title="The worker's container does not know the host name of the remote store.",
        shows=_answered(
            "Name or service not known",
            "Temporary failure in name resolution",
            "No address associated with hostname",
            "Error -2 connecting to",
            "Error -3 connecting to",
            "Error -5 connecting to",
        ),
        sentence="the name in remote_url has no address here",
        connectors=_IN_PROCESS,
        cause="DNS as this container sees it has no such name: a Kubernetes service of another namespace by its short "
        "name, a docker container on another network, or a slip in remote_url.",
        now="`getent hosts HOST` in the worker's container; in Kubernetes remote_url: "
        "redis://SERVICE.NAMESPACE.svc.cluster.local:6379, in docker one network for both (docker network connect); "
        "restart vLLM if remote_url was changed",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1046",
        name="remote-store-out-of-reach",
        severity=Severity.SLOW,
        title="Packets to the remote store are lost: there is no way to its address.",
        shows=_answered(
            "Timeout connecting to server",
            "Connection timed out",
            "No route to host",
            "Network is unreachable",
            "Error 110 connecting to",
            "Error 113 connecting to",
            "Error 101 connecting to",
        ),
        sentence="the store's address does not answer at all",
        connectors=_IN_PROCESS,
        cause="Nobody refuses: a firewall, a security group or a NetworkPolicy drops the packets, or the address is of "
        "a network that this node does not have (a pod or service address from outside of its cluster).",
        now="`nc -vz -w 3 HOST PORT` of remote_url from the worker's container: open that port for the worker's "
        "network, or give remote_url an address that it reaches; until then take remote_url out (unset "
        "LMCACHE_REMOTE_URL) and restart: each lookup waits for the time-out",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1048",
        name="remote-connector-lacks-a-module",
        severity=Severity.SLOW,
        title="The Python package of the remote store's client is not installed: the engine runs without the store.",
        shows=_answered("No module named '<module>'", says=_START),
        sentence="{module} is missing",
        connectors=_IN_PROCESS,
        cause="LMCache imports a store's client only when remote_url asks for it, and most are no part of its wheel. "
        "It only warns, and tries again in vain.",
        now="pip install in vLLM's environment: infinistore, valkey-glide-sync (glide_sync; before LMCache 0.4.3 "
        "valkey-glide), awscrt (s3), azure-storage-blob azure-identity, google-cloud-bigtable, redis, aiohttp "
        "(sagemaker), mooncake-transfer-engine; hf3fs_fuse comes with 3FS; restart",
        good="an image with that package",
    ),
    Problem(
        code="KVD1050",
        name="remote-store-has-no-descriptors",
        severity=Severity.SLOW,
        title="The worker may open no more files and connections: the remote store is not asked any more.",
        shows=_answered("Too many open files", "Error 24 connecting to"),
        sentence="no descriptor is left for the store",
        connectors=_IN_PROCESS,
        cause="Every connection to the store and every chunk that is read from files takes a descriptor, and the "
        "limit (1024 in many containers) is for the whole process. `ls /proc/PID/fd | wc -l` near `ulimit -n` proves "
        "it.",
        now="ulimit -n 1048576 before vllm serve (docker run --ulimit nofile=1048576:1048576, Kubernetes: the "
        "container runtime's limit), restart vLLM",
        good="that limit in the unit or the container's specification",
    ),
    Problem(
        code="KVD1052",
        name="remote-folder-refused",
        severity=Severity.SLOW,
        title="The worker may not write into the folder of the remote store.",
        shows=_answered("[Errno 13] Permission denied", "[Errno 30] Read-only file system"),
        sentence="the folder belongs to somebody else, or is mounted read-only",
        connectors=_IN_PROCESS,
        cause="fs:// makes its folder and its files as the user of the worker's process; the mount belongs to another "
        "user (NFS: root_squash), or is read-only.",
        now="`touch PATH/x` in the worker's container as its user: chown the mount to it (Kubernetes: securityContext "
        "fsGroup), mount it read-write, then restart vLLM; or remote_url: fs://host:0/ANOTHER/PATH",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1054",
        name="remote-loop-has-ended",
        severity=Severity.SLOW,
        title="LMCache asked its remote store after the thread that speaks to it had ended.",
        shows=_answered("Event loop is closed", "cannot schedule new futures after shutdown"),
        sentence="the thread of the remote store is gone",
        connectors=_IN_PROCESS,
        cause="The event loop of LMCache's storage manager is closed when the engine shuts down: as the last lines of "
        "a log this is harmless. In an engine that serves on, somebody closed LMCache (its close(), a second engine in "
        "the same process).",
        now="read what stands before the first of these lines: the engine's own end; if the engine serves on, restart "
        "it",
        good="nothing, if the engine was shut down; else one engine for each process",
        sure=False,
    ),
    Problem(
        code="KVD1080",
        name="remote-socket-not-there",
        severity=Severity.SLOW,
        title="The unix socket of the remote store is not there for the worker.",
        shows=_answered("connecting to unix socket"),
        sentence="the socket of remote_url cannot be connected",
        connectors=_IN_PROCESS,
        replaces=("KVD1042",),
        cause="unix:///PATH is a file: `No such file` means that the store does not make it (redis.conf: unixsocket), "
        "or makes it in another container; `Permission denied` that the worker's user may not use it (unixsocketperm); "
        "`Connection refused` that the store has ended and left it.",
        now="ls -l PATH in the worker's container; redis-server --unixsocket /tmp/redis/redis.sock --unixsocketperm "
        "777, and that directory mounted in both containers; or remote_url: redis://HOST:6379; LMCache tries again by "
        "itself",
        good="keep it so: the set-up was wrong, and no release changes that",
        threads=(_LMCACHE + "issues/2581",),
    ),
)
