"""LMCache's controller: operations (lookup, pin, ...) that its workers answer with an error."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_WORKER = "lmcache/v1/cache_controller/worker.py"
_EXECUTOR = "lmcache/v1/cache_controller/executor.py"
_SENDER = "lmcache/v1/cache_controller/full_sync_sender.py"
_MANAGER = "lmcache/v1/cache_controller/controller_manager.py"

PROBLEMS = (
    Problem(
        code="KVD827",
        name="controller-pin-broken",
        severity=Severity.SLOW,
        title="The controller's pin fails in every worker: it hands the lookup an argument of another name.",
        shows=(Logged("Worker error: LMCacheEngine.lookup() got an unexpected keyword argument 'request_id'"),),
        sentence="nothing was pinned",
        releases={"lmcache": "<0.3.12"},
        cause="The worker calls lookup(request_id=...), and the argument is lookup_id. Only pin does: lookup, move and "
        "clear of the controller go another way.",
        now="do without POST /pin; what must stay: a larger max_local_cpu_size",
        fixed={"lmcache": "0.3.12"},
        threads=(f"{_LMCACHE}issues/1707",),
    ),
    Problem(
        code="KVD828",
        name="controller-lookup-broken",
        severity=Severity.SLOW,
        title="The controller's lookup fails: the database of tokens lacks an attribute.",
        shows=(Logged("'ChunkedTokenDatabase' object has no attribute 'save_unfull_chunk'"),),
        releases={"lmcache": "<0.3.9"},
        cause="The controller makes its database without the engine's configuration, and these releases then leave "
        "save_unfull_chunk out.",
        now="upgrade LMCache on the controller's machine too: its release must be the workers'",
        fixed={"lmcache": "0.3.9"},
        threads=(f"{_LMCACHE}issues/1190",),
    ),
    Problem(
        code="KVD964",
        name="controller-not-reached",
        severity=Severity.SLOW,
        title="A worker of LMCache gets no answer from the controller.",
        shows=(
            Logged("Heartbeat timeout occurred, recreating socket. Error: <error>", _WORKER),
            Logged("ZMQ error occurred, recreating socket. Error: <error>", _WORKER),
            Logged("Timeout occurred, recreating socket. Error: <error>", _WORKER),
            Logged("Failed to register with controller: <error>", _WORKER),
        ),
        sentence="{error}",
        releases={"lmcache": ">=0.3.12"},
        sure=False,
        cause="No controller listens at controller_pull_url and controller_reply_url, from the view of the worker's "
        "container, or it hangs or was restarted. Without it no chunk of another instance is found (P2P); "
        "the engine itself goes on.",
        now="start lmcache_controller first (same LMCache release), with its ports published; in the workers' "
        "configuration controller_pull_url and controller_reply_url with a host that they reach, not localhost",
        good="the controller as a service that starts before the engines",
    ),
    Problem(
        code="KVD965",
        name="controller-too-few-ports",
        severity=Severity.CRASH,
        title="LMCache has fewer ports for its workers than there are ranks.",
        shows=(Failed(kind="ValueError", text="lmcache_worker_ports must have at least <wanted> port(s)", at=_WORKER),),
        sentence="{wanted} ports are needed",
        releases={"lmcache": ">=0.4.4"},
        cause="With enable_controller each rank that has a worker listens at a port of its own.",
        now="lmcache_worker_ports: [8700, 8701, ...], one for each rank (tensor times pipeline parallel size) or for "
        "each of lmcache_worker_ids",
        good="the same list",
    ),
    Problem(
        code="KVD695",
        name="controller-cannot-read-messages",
        severity=Severity.SLOW,
        title="The controller cannot read what a worker sends: its index loses chunks, and kvaware routing misses.",
        shows=(
            Logged("Error handling heartbeat request: <error>", _MANAGER),
            Logged("Error handling request message: <error>", _MANAGER),
            Logged("Unexpected message type on heartbeat socket: <error>"),
            Logged("Unknown worker message type: <error>", _MANAGER),
            Logged("Unknown worker request message type: <error>", _MANAGER),
            Logged("Invalid ROUTER message format, expected >= 3 frames, got <error>", _MANAGER),
            Logged("Invalid heartbeat ROUTER message format, expected >= 3 frames, got <error>", _MANAGER),
            Failed(kind="ValidationError", text="<error>", within="controller_manager.py:handle_batched_push_request"),
            Failed(kind="DecodeError", text="<error>", within="controller_manager.py:handle_batched_push_request"),
            Failed(kind="ValidationError", text="<error>", within="controller_manager.py:handle_batched_req_request"),
            Failed(kind="ValidationError", text="<error>", within="controller_manager.py:handle_heartbeat_request"),
        ),
        sentence="it stumbles over {error}",
        releases={"lmcache": ">=0.3.12"},
        sure=False,
        cause="Messages carry no version, so controller (the router's image in vLLM's production stack) and workers "
        "have to be of one LMCache release; the sockets are others from 0.3.12 on. With one release on both sides: the "
        "controller takes the third frame of a message for its content, which is wrong where the empty frame before "
        "it is missing (issue 3628). A batch that cannot be read (handle_batched_push_request) ends that "
        "handler, and the index gets no chunk any more.",
        now="compare `pip show lmcache` in the router's or controller's image with the engines', put the same release "
        "into both, restart the controller first and then the engines; the same already: "
        "pull request 3895 in the controller's controller_manager.py (`frames[-1]` in place of `frames[2]`)",
        good="one LMCache release on both sides; where they are the same a release with pull request 3895 (not in "
        "0.5.6)",
        replaces=("KVD975",),
        threads=(
            f"{_LMCACHE}issues/3628",
            f"{_LMCACHE}pull/3895",
            "https://github.com/vllm-project/production-stack/pull/1062",
        ),
    ),
    Problem(
        code="KVD1680",
        name="controller-gets-another-releases-message",
        severity=Severity.SLOW,
        title="The controller got a message of a kind that it does not expect there: the worker is not registered.",
        # How Python writes the type that is the value in LMCache's statement.
        shows=(Logged("Unknown message type: <class 'lmcache.v1.cache_controller.message.<kind>'>"),),
        sentence="it got {kind}",
        sure=False,
        cause="In this order. Controller (the router's image in vLLM's production stack) and workers are of two "
        "LMCache releases: up to 0.3.11 a worker registers at the pull socket, later at the reply socket. Or "
        "`controller_pull_url` and `controller_reply_url` name each other's port.",
        now="one LMCache release in the controller's or router's image and in the engines'; controller_pull_url with "
        "the port of `pull` in --monitor-ports, controller_reply_url with that of `reply`; the controller first, then "
        "the engines",
        good="one release on both sides",
        threads=("https://github.com/vllm-project/production-stack/pull/1060",),
    ),
    Problem(
        code="KVD697",
        name="controller-drops-silent-workers",
        severity=Severity.SLOW,
        title="The controller drops a worker that sends no heartbeat: its chunks are no longer found.",
        shows=(
            Logged(
                "Worker <worker> last heartbeat time: <last>, current time: <now>, more than <limit> seconds", _MANAGER
            ),
        ),
        said=(
            r"(?i)\bcontroller",
            r"(?i)heartbeat",
            r"(?i)\breap|deregister|drops? (?:silent|the worker|workers)",
            r"(?i)never s[e]n[dt]|default|silent",
        ),
        sentence="{worker} was dropped after {limit} seconds",
        releases={"lmcache": ">=0.3.10"},
        cause="Workers send heartbeats only if lmcache_worker_heartbeat_time is set, and it is not by default; the "
        "controller's check drops whoever is silent longer than its lmcache_worker_timeout. vLLM's production stack "
        "turns that check on. A worker with heartbeats that is dropped has died, or does not reach the controller.",
        now="lmcache_worker_heartbeat_time: 10 in the engines' configuration (LMCACHE_LMCACHE_WORKER_HEARTBEAT_TIME), "
        "restart the engines; or no check in the controller: lmcache_controller without --health-check-interval",
        good="keep it so: heartbeats are off by default in every release up to 0.5.6 (pull request 4808 is open)",
        threads=(f"{_LMCACHE}pull/4808",),
    ),
    Problem(
        code="KVD729",
        name="controller-index-incomplete",
        severity=Severity.SLOW,
        title="The controller's index of chunks is not complete: kvaware routing and P2P miss what is cached.",
        shows=(
            Logged("Failed to start full sync after <count> attempts", _SENDER),
            Logged("FullSyncStart not accepted, attempt <count>, error: <error>", _SENDER),
            Logged("Max resend attempts reached (<count>), giving up on missing batches: <batches>", _SENDER),
            Logged("Full sync status poll timeout, exiting freeze mode anyway", _SENDER),
            Logged("Error during full sync: <error>", _SENDER),
            Logged("Error sending FullSyncStartMsg: <error>", _SENDER),
            Logged("Error querying sync status: <error>", _SENDER),
            Logged("Sync ID mismatch: expected=<one>, received=<other>"),
            Logged("Key count mismatch on completion: received=<one>, reported=<other>"),
            Logged("Failed to complete full sync for worker <worker>: sync_id=<sync>"),
            Logged("Marked sync as failed for worker <worker>: reason=<error>"),
            Logged("KV batch sequence out of order detected: key=<key>, expected_seq=<one>, actual_seq=<other>, gap="),
        ),
        releases={"lmcache": ">=0.3.12"},
        sure=False,
        cause="Workers report chunks in numbered batches, and send all of them anew (full sync) when the controller "
        "has lost its state. Batches were lost: the controller was restarted or is too slow, its ports are not all "
        "reached, or it is of another LMCache release. While it sends, a worker stores and evicts nothing (freeze).",
        now="the same LMCache release in controller and engines, all of the controller's ports (pull, reply, "
        "heartbeat) published, lmcache_worker_heartbeat_time: 10; then restart the controller and after it the engines",
        good="the same; a gap once in a while is repaired by the next full sync",
    ),
    Problem(
        code="KVD973",
        name="controller-finds-no-chunk",
        severity=Severity.SLOW,
        title="The controller asked for chunks to be moved or compressed that are not there any more.",
        shows=(
            Failed(kind="AssertionError", text="Failed to get memory objects to move"),
            Failed(kind="AssertionError", text="LMCacheEngine.compress: Failed to get memory objects to compress"),
            Failed(
                kind="AssertionError",
                text="Failed to get compressed memory objects to decompress",
            ),
        ),
        sentence="a chunk of the request to the controller was not in the location that it names",
        cause="move, compress and decompress look the tokens up and then fetch each chunk from the location of the "
        "request (LocalCPUBackend, LocalDiskBackend); one was evicted in between, or is in another location.",
        now="store the prompt again (send the request), then the controller's call at once, with the location that its "
        "lookup answers; a larger max_local_cpu_size",
        good="no release of LMCache tells it in another way yet (0.5.6 asserts it)",
    ),
    Problem(
        code="KVD469",
        name="controller-command-fails",
        severity=Severity.SLOW,
        title="A worker could not carry out a command of the controller (clear, move, pin, compress).",
        shows=(Logged("Worker error:", _WORKER),),
        sure=False,
        cause="What stands behind it is the exception. Nothing: an assertion without text: no chunk of these tokens is "
        "in that location (a prompt shorter than chunk_size, 256, is not stored; the location is LocalCPUBackend or "
        "LocalDiskBackend), they lie in two locations, or a move between two locations of one instance.",
        now="POST /lookup with the same tokens (of POST /tokenize, all of them) first; a prompt of more than "
        "chunk_size tokens; the location that the lookup names",
        good="no release up to 0.5.6 says what is missing; then restart the controller, whose socket is out of step "
        "after an error (`Operation cannot be accomplished in the current state`)",
        threads=(f"{_LMCACHE}issues/1702", f"{_LMCACHE}issues/1703"),
    ),
    Problem(
        code="KVD473",
        name="controller-ranks-differ",
        severity=Severity.SLOW,
        title="Ranks of one engine did not do the same for a command of the controller.",
        shows=(
            Failed(kind="AssertionError", text="should be the same across all workers.", at=_EXECUTOR),
            Logged("should be the same across all workers."),
        ),
        cause="Each rank counts the tokens that it cleared, moved, pinned or compressed, and they differ: ranks evict "
        "on their own, so that one has chunks that another has lost.",
        now="POST /clear for the instance, then the prompt once more, then the command; a max_local_cpu_size that "
        "does not evict meanwhile",
        good="no release makes ranks evict alike in the engine's process (0.5.6); `lmcache server` has one cache for "
        "all",
        sure=False,
    ),
    Problem(
        code="KVD474",
        name="controller-socket-fails",
        severity=Severity.SLOW,
        title="A worker's connection to LMCache's controller fails.",
        shows=(
            Logged("Error happens in lmcache worker req_socket. Error: <error>", _WORKER),
            Logged("Push error: <error>", _WORKER),
        ),
        sentence="{error}",
        releases={"lmcache": ">=0.3.10.post1"},
        sure=False,
        cause="The controller is not there, was restarted, or another release of it answers. What a worker stores or "
        "evicts meanwhile is not told, so that the controller's lookups are wrong until the worker registers anew.",
        now="start lmcache_controller of the same release; controller_pull_url and controller_reply_url that the "
        "workers reach; then restart the engines",
        good="the controller as a service that starts before the engines",
    ),
    Problem(
        code="KVD1662",
        name="controller-answers-not-read",
        severity=Severity.RISK,
        title="A worker cannot read what the controller answers to its heartbeat.",
        shows=(
            Logged("Error happens in heartbeat socket. Error: <error>", _WORKER),
            Logged("Error during heartbeat: <error>", _WORKER),
        ),
        sentence="the answer to the heartbeat is not read: {error}",
        releases={"lmcache": ">=0.3.12"},
        cause="Time-outs and broken connections have lines of their own; what is left are messages that one side does "
        "not know, of another release. Commands that come with the answer (a full report of the chunks) are not "
        "executed, so that the controller's index stays behind.",
        now="pip show lmcache in the controller's and the worker's container: the same release; restart both",
        good="one release of LMCache on both sides",
        sure=False,
    ),
    Problem(
        code="KVD1664",
        name="worker-left-the-controller",
        severity=Severity.SLOW,
        title="What a worker has running to talk with the controller has ended, or did not begin.",
        shows=(Logged("Instance <instance>, worker <worker> error: <error>"),),
        sentence="worker {worker} of {instance} ended: {error}",
        releases={"lmcache": ">=0.3.9"},
        quotes=True,
        cause="It registers first; with an error there (the controller was not up when the engine started) nothing "
        "else begins. An error later ends one of the three that report chunks, answer requests and send heartbeats. "
        "The engine serves on; the controller's index, P2P and kvaware routing miss this worker.",
        now="start the controller, see its port open (ss -ltn), then restart this engine",
        good="the controller before the engines; no release up to 0.5.6 registers again by itself",
        sure=False,
    ),
    Problem(
        code="KVD1670",
        name="move-that-is-not-there",
        severity=Severity.RISK,
        title="The controller was asked for a move that its workers do not do.",
        shows=(
            Failed(kind="NotImplementedError", text="Prefetch from controller is not implemented yet.", at=_WORKER),
            Failed(kind="AssertionError", text="Only support moving to cpu for now.", at=_WORKER),
            Logged("Worker error: Prefetch from controller is not implemented yet."),
            Logged("Worker error: Only support moving to cpu for now."),
        ),
        sentence="this move is not implemented",
        cause="A worker moves chunks to LocalCPUBackend of another worker, over P2P. From its own disk to its own "
        "memory, or to a backend other than LocalCPUBackend, it does not.",
        now='POST /move with "new_position": [the address of the other worker, "LocalCPUBackend"]; to fill its own '
        "memory send the prompt with max_tokens 1",
        good="no release up to 0.5.6 has it",
    ),
)
