"""A connector in both roles, in one process: what the lab's engine asks of it, whichever it is."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvfix_tools.lab.request_events import RequestEvents

CLIENT = "lmcache.v1.lookup_client.lmcache_async_lookup_client"
#: Where LMCache opens sockets for lookups: adapters to 0.3, the transport since 0.4, asynchronous loading.
_OPENERS = ("lmcache.v1.lookup_client.lmcache_lookup_client", "lmcache.v1.rpc.zmq_transport", CLIENT)
#: Plugins' launchers to 0.3, and since: they have their clean-up called at the end of the process, and stay until then.
_LAUNCHERS = ("lmcache.v1.plugin.plugin_launcher", "lmcache.v1.plugin.runtime_plugin_launcher")


class Connector:
    """`in_scheduler`, `in_worker`: as vLLM calls it in each role. What it loads and stores goes to `events`."""

    scheduler: Scheduler
    in_scheduler: Any
    in_worker: Any
    #: Of kvfix.connector_events.readers, for the scheduler's role.
    reader: Any
    events: RequestEvents
    #: In a MultiConnector, the one that is asked first.
    other: OtherConnector | None = None
    #: request -> chunks after which its next load fails
    failing: dict[str, int]

    def listen(self, events: RequestEvents) -> None:
        self.events = events

    def metadata(self, output: Any) -> Any:
        """What the scheduler's role sends to the worker's in this step."""
        metadata = output.kv_connector_metadata
        return metadata if self.other is None else metadata.metadata[1]

    def kept(self) -> dict[str, set[str]]:
        """Where the connector keeps what of which requests: nothing of those that have ended may be among it."""
        return {where: set(names) for where, names in self.reader.kept()}

    # ------------------------------------------------------------------ a step

    def tick(self) -> None:
        """A step of the engine begins."""

    def start_step(self, metadata: Any, forward: bool) -> None:
        """What vLLM's worker calls before the forward pass."""
        self.in_worker.bind_connector_metadata(metadata)
        self.in_worker.start_load_kv(SimpleNamespace(attn_metadata=object() if forward else None))

    def finish_step(
        self, forward: bool, ended: set[str], save_last: bool
    ) -> tuple[set[str] | None, set[str] | None, set[int]]:
        """What it calls after: (finished sending, finished receiving, blocks that failed to load)."""
        if forward and not save_last:
            self.in_worker.wait_for_save()
        sending, receiving = self.get_finished(ended)
        failed = self.in_worker.get_block_ids_with_load_errors()
        if forward and save_last:
            self.in_worker.wait_for_save()
        return sending, receiving, failed

    def get_finished(self, ended: set[str]) -> Any:
        return self.in_worker.get_finished(ended)

    # ------------------------------------------------------------------ what is in flight; by default nothing

    def busy(self) -> bool:
        """Whether a transfer or lookup is in flight."""
        return False

    def loading(self) -> set[str]:
        """Requests with a load in flight."""
        return set()

    def looking(self) -> set[str]:
        """Requests whose lookup is not answered yet."""
        return set()

    def in_flight(self, request: str) -> set[str]:
        """What is in flight for this request between steps: looking, loading, storing."""
        return set()

    def failed_requests(self) -> dict[str, set[str]]:
        """Requests whose load has failed within this step, where vLLM wants them by name (`failed_recving`)."""
        return {}

    def failed_blocks(self) -> set[int]:
        """Blocks whose load has failed within this step."""
        return set()


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
