"""The base class of the lab's connectors. The scheduler and worker roles run in one process."""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from kvfix_tools.lab.options import Options

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvfix_tools.lab.engine.memory import Cache
    from kvfix_tools.lab.engine.request_events import RequestEvents
    from kvfix_tools.lab.engine.workers import Worker

CLIENT = "lmcache.v1.lookup_client.lmcache_async_lookup_client"
#: The modules in which LMCache opens lookup sockets. LMCache up to 0.3 uses the first module, and LMCache from 0.4 on
#: uses the second. Asynchronous loading uses the third.
_OPENERS = ("lmcache.v1.lookup_client.lmcache_lookup_client", "lmcache.v1.rpc.zmq_transport", CLIENT)
#: LMCache's plugin launcher registers an atexit handler. The launcher is in the first module up to LMCache 0.3.
_LAUNCHERS = ("lmcache.v1.plugin.plugin_launcher", "lmcache.v1.plugin.runtime_plugin_launcher")


class Connector:
    """A connector in the scheduler role (`in_scheduler`) and worker role (`workers`). Both roles record `events`."""

    scheduler: "Scheduler"
    in_scheduler: Any
    #: The worker of each rank. With a MultiConnector, the lab runs only one rank.
    workers: "Sequence[Worker]"
    #: Reads the connector's own state in the scheduler role (a kvfix.engine_state.reader.Reader).
    reader: Any
    events: "RequestEvents"
    #: The lab's own child of a MultiConnector, or None. `offloading`: the offloading connector, alone or as a child.
    other: "OtherConnector | None" = None
    offloading: Any = None
    _place = 0

    def listen(self, events: "RequestEvents") -> None:
        self.events = events
        if self.offloading is not None:
            self.offloading.events = events

    def _of_lmcache(self, options: Options, connector: Any) -> Any:
        """Return LMCache's connector: `connector` itself, or its child if `connector` is a MultiConnector."""
        self._place = options.asked_before
        children = getattr(connector, "_connectors", None)
        return connector if children is None else children[self._place]

    def _called(self, in_worker: Any) -> Any:
        """Return the connector that vLLM calls in the worker role. in_worker: LMCache's connector in this role."""
        connector = self.scheduler.connector
        if connector is self.in_scheduler:
            return in_worker
        children = [in_worker if each is self.in_scheduler else each for each in connector._connectors]
        for place, each in enumerate(children):
            if each is not in_worker and not isinstance(each, OtherConnector):
                children[place] = type(each)(each._vllm_config, KVConnectorRole.WORKER, each._kv_cache_config)
        worker = copy.copy(connector)
        vars(worker).update(_connectors=children, _role=KVConnectorRole.WORKER, _extra_async_saves={})
        return worker

    def _join_others(self, options: Options) -> None:
        """Connect the children of a MultiConnector, except LMCache's connector, to the lab's memory."""
        worker = self.workers[0]
        if options.beside:
            self.other = next(each for each in worker.called._connectors if isinstance(each, OtherConnector))
        if options.offloading:
            place = 0 if options.offloading == "first" else -1
            in_scheduler, in_worker = (each._connectors[place] for each in (self.scheduler.connector, worker.called))
            self.offloading = self._offloads(options, [worker.slots], in_scheduler, [in_worker])
            worker.offloads = True

    def _offloads(self, options: Options, memories: Any, in_scheduler: Any, in_workers: Sequence[Any]) -> Any:
        simple = options.simple_offloading or options.connector == "simple-offload"
        module: Any = import_module(f"kvfix_tools.lab.connectors.{'simple_offload' if simple else 'offloading'}")
        pairs = enumerate(zip(memories, in_workers, strict=True))
        ranks = [module.Rank(rank, slots, options, in_worker) for rank, (slots, in_worker) in pairs]
        return module.Offloading(options, ranks, self.scheduler, in_scheduler)

    def loads_by_other(self, request: str) -> bool:
        """Return True if the MultiConnector lets a child other than LMCache's connector load this request."""
        chosen: dict[str, int] = getattr(self.scheduler.connector, "_requests_to_connector", {})
        return chosen.get(request, self._place) != self._place

    def metadata(self, metadata: Any) -> Any:
        """Return LMCache's part of the metadata of a step."""
        children = getattr(metadata, "metadata", None)
        return metadata if children is None else children[self._place]

    def kept(self) -> dict[str, set[str]]:
        """Return {attribute: requests whose state the attribute holds}. A connector must not keep ended requests."""
        of_others = {} if self.offloading is None else self.offloading.kept()
        return {**{where: set(names) for where, names in self.reader.kept()}, **of_others}

    def reads_wrong(self, name: str, message: str) -> None:
        """Record that a step has read wrong KV in blocks that no worker has reported as failed."""
        self.events.wrong_content(name, message)

    def not_to_store(self, request: Any) -> str:
        """Return why this request must not be stored, or "" if it may be stored."""
        return ""

    def evict(self, cache: "Cache", chunks: int, forced: bool) -> int:
        """Evict the oldest chunks and return their number. forced: evict pinned chunks too."""
        return cache.evict(chunks, forced)

    def never_given_back(self) -> None:
        """Report blocks that the connector still holds for ended requests. The lab calls this method after a run."""
        if self.offloading is not None:
            self.offloading.never_given_back()

    def fail_store(self, name: str, rank: int = 0) -> None:
        """Let the next store of this request to CPU memory fail in this rank."""
        self.offloading.ranks[rank].failing_stores.add(name)

    def close(self) -> None:
        if self.offloading is not None:
            self.offloading.close()

    def tick(self) -> None:
        if self.offloading is not None:
            self.offloading.tick()

    def exchange(self) -> None:
        """Deliver this step's lookups to the workers, and the workers' answers to the scheduler."""

    def busy(self) -> bool:
        """Return True if a transfer or a lookup is in flight."""
        return self.offloading is not None and bool(self.offloading.busy)

    def loading(self) -> set[str]:
        """Return the requests with a load in flight."""
        return set() if self.offloading is None else self.offloading.requests(loads=True)

    def looking(self) -> set[str]:
        """Return the requests whose lookup is not answered yet."""
        return set()

    def storing(self) -> set[str]:
        """Return the requests with a store in flight."""
        return set() if self.offloading is None else self.offloading.requests(loads=False)

    def is_looking(self, request: str) -> bool:
        return request in self.looking()

    def in_flight(self, request: str) -> set[str]:
        """Return the operations in flight for this request, a subset of {"looking", "loading", "storing"}."""
        doing = {"loading": request in self.loading(), "storing": request in self.storing()}
        doing["looking"] = self.is_looking(request)
        return {name for name, yes in doing.items() if yes}


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


class OtherConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """The lab's child of a MultiConnector. The lab decides which requests have KV in this child, and loads the KV."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        #: Requests with KV in this connector, namely the KV of all full blocks before the request's last token.
        self.has: set[str] = set()
        #: {request: (first token, end)} of the loads that have allocated blocks and have not ended
        self.loads: dict[str, tuple[int, int]] = {}
        self._computed: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self._computed[request.request_id] = num_computed_tokens
        if request.request_id not in self.has:
            return 0, False
        size = self._vllm_config.cache_config.block_size
        return max(0, (request.num_tokens - 1) // size * size - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            start = self._computed[request.request_id]
            self.loads[request.request_id] = (start, start + num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = nothing


class Nothing:
    """Replaces a socket, a context or a thread, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return nothing


@contextmanager
def no_sockets() -> Iterator[None]:
    """In this context a connector opens no socket, starts no lookup thread, and registers no atexit handler."""
    with ExitStack() as patches:
        for name in (*_OPENERS, *_LAUNCHERS):
            try:
                module = import_module(name)
            except ModuleNotFoundError:
                continue
            replaced: dict[str, Any] = {"get_zmq_socket": Nothing, "get_zmq_context": Nothing, "atexit": Nothing()}
            if name == CLIENT:
                replaced["threading"] = SimpleNamespace(Thread=Nothing, Lock=threading.Lock)
            for key, value in replaced.items():
                if hasattr(module, key):
                    patches.enter_context(mock.patch.object(module, key, value))
        yield
