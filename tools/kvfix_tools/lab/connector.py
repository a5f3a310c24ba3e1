"""A connector in both roles, in one process: what the lab's engine asks of it, whichever it is."""

from __future__ import annotations

import copy
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvfix_tools.lab.options import Options

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvfix_tools.lab.memory import Cache, Slots
    from kvfix_tools.lab.offloading import Offloading
    from kvfix_tools.lab.request_events import RequestEvents
    from kvfix_tools.lab.simple_offload import SimpleOffloading
    from kvfix_tools.lab.workers import Worker

CLIENT = "lmcache.v1.lookup_client.lmcache_async_lookup_client"
#: Where LMCache opens sockets for lookups: adapters to 0.3, the transport since 0.4, asynchronous loading.
_OPENERS = ("lmcache.v1.lookup_client.lmcache_lookup_client", "lmcache.v1.rpc.zmq_transport", CLIENT)
#: Plugins' launchers to 0.3, and since: they have their clean-up called at the end of the process, and stay until then.
_LAUNCHERS = ("lmcache.v1.plugin.plugin_launcher", "lmcache.v1.plugin.runtime_plugin_launcher")


class Connector:
    """`in_scheduler`: LMCache's in that role; each of the `workers` has it in the other.

    What it loads and stores goes to `events`.
    """

    scheduler: Scheduler
    in_scheduler: Any
    #: By rank; one, in a MultiConnector.
    workers: Sequence[Worker]
    #: Of kvfix.connector_events.readers, for the scheduler's role.
    reader: Any
    events: RequestEvents
    #: The other ones of a MultiConnector.
    other: OtherConnector | None = None
    offloading: Offloading | SimpleOffloading | None = None
    _place = 0

    def listen(self, events: RequestEvents) -> None:
        self.events = events
        if self.offloading is not None:
            self.offloading.events = events

    # ------------------------------------------------------------------ alone, or one of a MultiConnector

    def _of_lmcache(self, options: Options, connector: Any) -> Any:
        """LMCache's connector, of what vLLM has made in one of the roles."""
        self._place = options.asked_before
        children = getattr(connector, "_connectors", None)
        return connector if children is None else children[self._place]

    def _called(self, in_worker: Any) -> Any:
        """What vLLM calls in the worker's role, where LMCache's connector is made by hand."""
        connector = self.scheduler.connector
        if connector is self.in_scheduler:
            return in_worker
        children = [in_worker if each is self.in_scheduler else _in_worker(each) for each in connector._connectors]
        worker = copy.copy(connector)
        vars(worker).update(_connectors=children, _role=KVConnectorRole.WORKER, _extra_async_saves={})
        return worker

    def _join_others(self, options: Options) -> None:
        """The other connectors of a MultiConnector have the lab's memory too."""
        worker = self.workers[0]
        if options.beside:
            self.other = next(each for each in worker.called._connectors if isinstance(each, OtherConnector))
        if options.offloading:
            place = 0 if options.offloading == "first" else -1
            in_scheduler, in_worker = (each._connectors[place] for each in (self.scheduler.connector, worker.called))
            self.offloading = self._offloads(options, worker.slots, in_scheduler, in_worker)
            worker.offloads = True

    def _offloads(self, options: Options, slots: Slots, in_scheduler: Any, in_worker: Any) -> Any:
        """The one of the others that offloads, joined."""
        if options.simple_offloading:
            from kvfix_tools.lab import simple_offload

            copying = simple_offload.Rank(0, slots, options, in_worker)
            return simple_offload.SimpleOffloading(options, [copying], self.scheduler, in_scheduler)
        from kvfix_tools.lab import offloading

        return offloading.Offloading(options, [offloading.Rank(0, slots, options, in_worker)], in_scheduler)

    def loads_by_other(self, request: str) -> bool:
        """Whether the MultiConnector has chosen another connector to load for this request."""
        chosen: dict[str, int] = getattr(self.scheduler.connector, "_requests_to_connector", {})
        return chosen.get(request, self._place) != self._place

    def metadata(self, metadata: Any) -> Any:
        """LMCache's part of what the scheduler's role sends to the worker's in a step."""
        children = getattr(metadata, "metadata", None)
        return metadata if children is None else children[self._place]

    def kept(self) -> dict[str, set[str]]:
        """Where the connector keeps what of which requests: nothing of those that have ended may be among it."""
        of_others = {} if self.offloading is None else self.offloading.kept()
        return {**{where: set(names) for where, names in self.reader.kept()}, **of_others}

    def reads_wrong(self, name: str, message: str) -> None:
        """A step has read wrong KV, and not in blocks of which it is known that their load has failed."""
        self.events.wrong_content(name, message)

    def not_to_store(self, request: Any) -> str:
        """Why nothing of this request may be stored; "" if it may."""
        return ""

    def evict(self, cache: Cache, chunks: int, forced: bool) -> int:
        """The oldest chunks leave the cache; forced: pinned ones too. How many it were."""
        return cache.evict(chunks, forced)

    def never_given_back(self) -> None:
        """All is over: blocks of ended requests that are still kept for the connector are a violation, if it looks."""
        if self.offloading is not None:
            self.offloading.never_given_back()

    def close(self) -> None:
        """The engine ends."""

    # ------------------------------------------------------------------ a step

    def tick(self) -> None:
        """A step of the engine begins."""
        if self.offloading is not None:
            self.offloading.tick()

    def exchange(self) -> None:
        """Lookups of this step reach the workers, and answers the scheduler, where that takes messages."""

    # ------------------------------------------------------------------ what is in flight; of others, by default

    def busy(self) -> bool:
        """Whether a transfer or lookup is in flight."""
        return self.offloading is not None and self.offloading.busy

    def loading(self) -> set[str]:
        """Requests with a load in flight."""
        return set() if self.offloading is None else self.offloading.requests(loads=True)

    def looking(self) -> set[str]:
        """Requests whose lookup is not answered yet."""
        return set()

    def in_flight(self, request: str) -> set[str]:
        """What is in flight for this request between steps: looking, loading, storing."""
        return set() if self.offloading is None else self.offloading.in_flight(request)


def _in_worker(connector: Any) -> Any:
    """Another connector of the MultiConnector, in the worker's role."""
    if isinstance(connector, OtherConnector):
        return connector
    return type(connector)(connector._vllm_config, KVConnectorRole.WORKER, connector._kv_cache_config)


class OtherConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """The other connector of a MultiConnector, both roles: it has what the schedule says, and is asked first.

    vLLM takes the first connector that promises tokens; the other ones are asked too, and granted nothing. What this
    one loads, the lab's engine writes into the slots.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        #: Requests that it has, all whole blocks but the one with the last token.
        self.has: set[str] = set()
        #: request -> (first token, end) of loads that were granted and are not done
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

    def start_load_kv(self, forward_context: Any, **more: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **more: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class _Nothing:
    """A socket, a context or a thread that does nothing, whatever it is asked."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@contextmanager
def no_sockets() -> Iterator[None]:
    """A connector made here opens no socket, starts no thread for its lookups, and is not kept for the exit."""
    with ExitStack() as patches:
        for name in (*_OPENERS, *_LAUNCHERS):
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError:
                continue
            replaced: dict[str, Any] = {"get_zmq_socket": _Nothing, "get_zmq_context": _Nothing, "atexit": _Nothing()}
            if name == CLIENT:
                replaced["threading"] = SimpleNamespace(Thread=_Nothing, Lock=threading.Lock)
            for key, value in replaced.items():
                if hasattr(module, key):
                    patches.enter_context(mock.patch.object(module, key, value))
        yield
