"""Run vLLM's NixlConnector in one engine of the lab, as scheduler and as worker. The mode is pull or push.

pair.py makes two engines. The lab replaces NIXL's agent (nixl_network.py or nixl_real.py), the handshake's sockets and
threads, the attention backend, and the clock of the leases. The lab's agent registers the lab's KV cache.
"""

import threading
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kvfix import clock
from kvfix.connector_events import readers
from kvfix.ledger import events as ev
from kvfix_tools.lab.connectors.nixl_network import Network, Signal
from kvfix_tools.lab.connectors.nixl_real import RealNetwork
from kvfix_tools.lab.engine import byte_memory, kv_layout, vllm_objects
from kvfix_tools.lab.engine.memory import Slots
from kvfix_tools.lab.fuzz.parameters import Params
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.pair.pair_engine import PairSide, PairWorker
from kvfix_tools.ledger import LeaseRead, WriteBegun, WriteEnded, Written

_MODULES = "base_scheduler", "pull_scheduler", "push_scheduler", "base_worker", "pull_worker", "push_worker"
#: The kv_transfer_params that the router sends to prefill.
PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
PORT = 5600


class AnyBlockSize(CPUAttentionBackend):  # type: ignore[misc]
    """An attention backend that accepts blocks of any size, because no attention kernel runs in the lab."""

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any) -> list[Any]:
        return [MultipleOf(1)]


def module(name: str) -> Any:
    return import_module(f"vllm.distributed.kv_transfer.kv_connector.v1.nixl.{name}")


def replace(network: Network) -> None:
    time = SimpleNamespace(perf_counter=lambda: clock.now(), monotonic=lambda: clock.now(), time=lambda: clock.now())
    for name in _MODULES:
        module(name).time = time
    scheduler: Any = module("base_scheduler")
    scheduler.zmq_ctx = network.socket
    scheduler.threading = SimpleNamespace(Thread=network.listen, Event=threading.Event)
    worker: Any = module("base_worker")
    worker.NixlWrapper = network.agent
    worker.zmq_ctx = network.socket
    worker.ThreadPoolExecutor = lambda **_: network.executor()
    _be_rank()
    worker.get_current_attn_backends = lambda *_: [AnyBlockSize]
    worker.current_platform.discover_numa_topology = lambda *_: []  # vLLM's function binds the process to a core
    if hasattr(worker, "check_nixl_version"):  # since vLLM 0.33
        worker.check_nixl_version = lambda _: None
    module("push_worker").threading = SimpleNamespace(Thread=network.writer, Event=Signal, Lock=threading.Lock)


def _be_rank(rank: int = 0, ranks: int = 1) -> None:
    worker: Any = module("base_worker")
    worker.get_tensor_model_parallel_rank, worker.get_tensor_model_parallel_world_size = lambda: rank, lambda: ranks


class Together:
    """Collects the reports of the ranks until all ranks have reported, as vLLM's KVOutputAggregator does."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._reports: dict[tuple[str, str], list[Any]] = {}
        #: {request: ranks that are writing the request's KV to the peer}
        self.writing: dict[str, set[int]] = {}

    def reported(self, what: str, request: str, how: Any) -> list[Any]:
        """Add a report. Return the reports of all ranks, or [] if a rank has not reported yet."""
        reports = self._reports.setdefault((what, request), [])
        reports.append(how)
        return self._reports.pop((what, request)) if len(reports) == self._ranks else []


class NixlWorker(PairWorker):
    def __init__(self, side: Any, slots: Slots, called: Any, options: Options) -> None:
        adapter = called.connector_worker
        super().__init__(side, adapter.tp_rank, slots, called, adapter)
        self.together: Together
        #: Requests whose lease has expired in this step.
        self._expired: set[str] = set()
        adapter._reap_expired_send_leases = self._note_expired
        called.register_kv_caches(kv_layout.kv_caches(options, byte_memory.tensor(slots, options, self.rank)))

    def _note_expired(self, sent: set[str]) -> None:
        before = set(sent)
        type(self.adapter)._reap_expired_send_leases(self.adapter, sent)  # a fix may wrap the class's method
        self._expired = sent - before

    def get_finished(self, ended: set[str]) -> Any:
        peers = {name: meta.remote.request_id for name, meta in self.adapter._recving_metadata.items()}
        sent, received = super().get_finished(ended)
        for name in sent:
            expired = self.together.reported("sent", name, name in self._expired)
            if expired:
                self.side.network.add(ev.LeaseEnded(name, any(expired)))
        for name in [*(received - self._failed_requests), *self._failed_requests]:
            read = self.together.reported("read", name, name not in self._failed_requests)
            if read and all(read):
                self.has_loaded(name, peers[name])
        for name in received:
            start, end = self.due.pop(name, (0, 0))
            end = start if name in self._failed_requests else end
            self.events.loaded(name, end, end - start, self.rank)
        return sent, received

    def has_loaded(self, name: str, of: str) -> None:
        """Record that decode's request `name` has loaded the blocks that prefill holds for its request `of`."""
        self.side.network.add(LeaseRead(of, name))


class NixlSide(PairSide):
    worker_class: Any = NixlWorker

    @classmethod
    def make_network(cls, options: Options) -> Network:
        return RealNetwork(options.delay) if options.real_transfers else Network(options.delay)

    def join(self) -> None:
        replace(self.network)

    def introduce(self, in_scheduler: Any) -> None:
        self.scheduler_side.side_channel_host, self.scheduler_side.side_channel_port = self.name, PORT
        in_scheduler.set_xfer_handshake_metadata_pp_aware(
            {(0, worker.rank): worker.in_worker.get_handshake_metadata() for worker in self.between}
        )
        together = Together(len(self.between))
        for worker in self.between:
            worker.together = together

    def _worker_of_rank(self, rank: int, slots: Slots, options: Options, config: Any) -> Any:
        _be_rank(rank, options.ranks)
        connector = vllm_objects.worker(options, vllm_objects.of_rank(config, rank))
        _be_rank()
        made = self.worker_class(self, slots, connector, options)
        made.adapter.nixl_wrapper.late = options.rank_delay if rank else 0
        return made

    def for_prefill(self, name: str) -> Params:
        return dict(PREFILL)

    def keeps(self, request: str) -> bool:
        return request in self.scheduler_side._reqs_need_send

    def close(self) -> None:
        super().close()
        for worker in self.between:
            self.network.agents[worker.adapter.nixl_wrapper.name].close()
            with suppress(Exception):
                worker.adapter.shutdown()

    @property
    def leases(self) -> set[str]:
        return set().union(*(worker.adapter._reqs_to_send for worker in self.between))

    def busy(self) -> bool:
        return super().busy() or self.network.busy or bool(self.leases)

    def loading(self) -> set[str]:
        return super().loading().union(*(worker.adapter._recving_metadata for worker in self.between))

    def kept(self) -> dict[str, set[str]]:
        in_workers = {
            f"{where} of rank {worker.rank}" if worker.rank else where: set(names)
            for worker in self.between
            for where, names in readers.reader(worker.in_worker).kept()
        }
        return {**super().kept(), **in_workers}


class PushWorker(NixlWorker):
    """A worker in push mode: prefill writes into decode's blocks. This class records when a write begins and ends."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        write, done = self.adapter._xfer_blocks_for_req, self.adapter._pop_done_transfers

        def writes(req_id: str, meta: Any) -> None:
            write(req_id=req_id, meta=meta)
            if req_id in self.adapter._sending_transfers:
                self.together.writing.setdefault(req_id, set()).add(self.rank)
                self.side.network.add(WriteBegun(req_id, meta.remote.request_id))

        def pops(transfers: Any) -> Any:
            ended, failed = done(transfers)
            if transfers is self.adapter._sending_transfers:
                for name in ended:
                    ranks = self.together.writing.get(name, set())
                    ranks.discard(self.rank)
                    if not ranks:
                        self.together.writing.pop(name, None)
                        self.side.network.add(WriteEnded(name))
            return ended, failed

        self.adapter._xfer_blocks_for_req = writes
        self.adapter._pop_done_transfers = pops

    def begun(self) -> None:
        self.side.network.write()

    def get_finished(self, ended: set[str]) -> Any:
        waiting = self.adapter._recving_metadata
        for notice in list(self.adapter._pending_completion_notifs.queue):
            name = notice.decode().rpartition(":")[0]
            if name and not notice.startswith(b"HB:"):
                self.side.network.add(Written(name, name in waiting))
        return super().get_finished(ended)

    def has_loaded(self, name: str, of: str) -> None: ...


class PushSide(NixlSide):
    """NixlSide for push mode. Decode sends its block ids to prefill in a notice, which vLLM calls a registration."""

    worker_class = PushWorker

    def busy(self) -> bool:
        return super().busy() or bool(self.loading())  # the peer may still push

    def kept_of_peer(self) -> set[str]:
        return set().union(*(worker.adapter._pending_d_registrations for worker in self.between))

    def for_decode(self, name: str, answer: Params | None) -> Params | None:
        if answer is not None:
            return answer
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [],
            "remote_engine_id": self.engine_id, "remote_request_id": name, "remote_host": self.name,
            "remote_port": PORT, "tp_size": len(self.workers),
        }  # fmt: skip
