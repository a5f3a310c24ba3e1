"""MooncakeConnector's prefill writes into blocks that decode has given to another request: silent wrong text.

## Symptom
Wrong text, HTTP 200, after loads that have failed. The decode engine logs `pulling kv_caches for [...] failed: transfer
failed: Resource temporarily unavailable`; the prefill engine nothing.

## Cause
Decode gives a load up VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT and 60 s after it has sent prefill its blocks
(mooncake_connector.py 0.32.0:2350), and vLLM frees them. The same timeout of prefill runs from when it takes the
message (:1587). It takes it later if its process hangs, or if all of its 2 * num_workers tasks wait for prefills
(:1456): then it writes when decode has given up, into what is another request's.

## Fix
The message names an end, by the clock of the prefill engine, after which that one begins no write. A decode engine asks
each of its workers for its clock before it sends it the first message, and again after a day. Both engines need the
fix: with a prefill engine that has it not all is as released, and that one logs an error for the question.

## Releases
vLLM 0.32.0, the first one played, and 0.33.0.

## Upstream
None known.

## Remove when
Both engines of vLLM agree on the end of a load.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Generator
from concurrent.futures import Future
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from kvfix.fixes import stubs
from kvfix.fixes.api import AT_START, Fix
from kvfix.fixes.targets import MOONCAKE_WORKER
from kvfix.wrapping import around, before, instead

#: The question. No release takes it for a message: it answers with an error at once.
_ASK = b"kvfix asks for the time"
#: The answer: seconds of perf_counter follow. vLLM logs it as an error.
_CLOCK = "kvfix, no error: a decode engine asks for the time, it is "
#: Name of what is no request, in the message: {address of a worker: its end, by its clock} follows.
_UNTIL = "kvfix until "
#: Seconds after which a clock is asked for again. Two clocks may drift apart by some seconds in a day.
_DAY = 86_400.0


def asks(module: ModuleType) -> Callable[..., Any]:
    def receive_kv(worker: Any, engine: str, metas: dict[str, Any]) -> Generator[Any, Any, Any] | None:
        clocks = vars(worker).setdefault("_kvfix_clocks", {}).setdefault(engine, {})
        now = module.time.perf_counter()
        addresses = [each for ranks in worker._remote_agents[engine].values() for each in ranks.values()]
        unknown = [each for each in addresses if each not in clocks or clocks[each][1] < now - _DAY]
        if unknown:
            task = asyncio.create_task(_ask(module, worker, engine, metas, unknown))
            tasks = vars(worker).setdefault("_kvfix_tasks", set())  # a loop keeps no task alive
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            return instead(None)
        until = now + module.envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
        ends = {each: until + clocks[each][0] for each in addresses if clocks[each][0] is not None}
        if not ends:
            return None
        name = _UNTIL + json.dumps(ends)
        # it counts as failed: no answer says anything of it
        end = module.PullReqMeta(name, "", [], engine, "", failed=True)
        return _with(engine, {**metas, name: end})

    return around(receive_kv)


def _with(engine: str, metas: dict[str, Any]) -> Generator[Any, Any, Any]:
    return (yield (engine, metas))


async def _ask(module: Any, worker: Any, engine: str, metas: dict[str, Any], addresses: list[str]) -> None:
    try:
        for address in addresses:
            worker._kvfix_clocks[engine][address] = await _clock(module, worker, address), module.time.perf_counter()
    except module.zmq.ContextTerminated:
        return  # the engine ends
    except Exception as error:  # noqa: BLE001
        worker._handle_failed_recv(metas, list(metas), f"transfer failed: {error}")
        return
    worker.receive_kv(engine, metas)


async def _clock(module: Any, worker: Any, address: str) -> float | None:
    """Seconds by which its clock is ahead of this one's, at least; None: it has not this fix. Raises zmq.Again."""
    with module.make_zmq_socket(worker.async_zmq_ctx, address, module.zmq.DEALER, bind=False, linger=0) as socket:
        socket.setsockopt(module.zmq.RCVTIMEO, module.envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT * 1000)
        await socket.send(_ASK)
        answer = worker._xfer_resp_decoder.decode(await socket.recv()).err_msg or ""
    # by now its clock has gone on: the end that follows from this is never too late
    return float(answer[len(_CLOCK) :]) - module.time.perf_counter() if answer.startswith(_CLOCK) else None


def takes_ends(module: ModuleType) -> Callable[..., Any]:
    def register_kv_caches(worker: Any, *_: Any) -> None:
        ends: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        worker._xfer_meta_decoder = _Decoder(module, worker, ends)
        worker._sender_executor = _Executor(module, worker._sender_executor, ends)

    return before(
        register_kv_caches,
        when=lambda worker, *_: not worker.is_kv_consumer and not isinstance(worker._xfer_meta_decoder, _Decoder),
    )


class _Decoder:
    """Of messages. ends: of the message that each task of the sender's loop has taken last."""

    def __init__(self, module: Any, worker: Any, ends: WeakKeyDictionary[Any, float]) -> None:
        self._module, self._worker, self._own, self._ends = module, worker, worker._xfer_meta_decoder, ends

    def decode(self, message: bytes) -> Any:
        """Raises the answer to a question for the time: vLLM sends what is raised here back."""
        if message == _ASK:
            raise ValueError(f"{_CLOCK}{self._module.time.perf_counter()!r}")
        taken = self._own.decode(message)
        task = asyncio.current_task()
        self._ends.pop(task, None)
        for name in [each for each in taken.req_blocks if each.startswith(_UNTIL)]:
            del taken.req_blocks[name]
            address = f"tcp://{self._worker.hostname}:{self._worker.side_channel_port}"
            end = json.loads(name[len(_UNTIL) :]).get(address)
            if end is not None:
                self._ends[task] = end
        return taken


class _Executor:
    """Of writes. One that comes after its end fails."""

    def __init__(self, module: Any, own: Any, ends: WeakKeyDictionary[Any, float]) -> None:
        self._module, self._own, self._ends = module, own, ends

    def submit(self, send: Any, *arguments: Any) -> Any:
        end = self._ends.get(asyncio.current_task())
        if end is None or self._module.time.perf_counter() < end:
            return self._own.submit(send, *arguments)
        over: Future[int] = Future()
        over.set_result(-1)
        return over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


FIX = Fix(
    __name__,
    __doc__,
    effect="wrong output",
    targets=(
        MOONCAKE_WORKER.register_kv_caches(broken=">=0.32", probe=stubs.cannot_tell, fix=takes_ends),
        MOONCAKE_WORKER.receive_kv(broken=">=0.32", probe=stubs.cannot_tell, fix=asks, helper=True),
    ),
    evidence={"LAB001": "", "LAB008": ""},
    scenarios=("mooncake-write-outlives-load",),
    attaches=AT_START,
    no_patch={"vllm": "how long a write may take has to be agreed between both engines: a change of its messages"},
)
