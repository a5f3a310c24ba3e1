"""With a dead or degraded worker every lookup waits the whole timeout, on every step, for the head of the queue.

## Symptom
`Timeout occurred for rank 0, recreating all sockets. Error: Resource temporarily unavailable`, over and over, and
hardly any throughput: each step of the scheduler takes `lookup_timeout_ms` (3 seconds). Six short requests took 374
seconds.

## Cause
A lookup that times out is answered as no hit, and nothing remembers it: the next question, for the same request if
there is no room for it yet, waits as long again. The scheduler stands still meanwhile, and with it all that runs.

## Fix
After two lookups in a row that timed out (a worker may be back after one) no other is tried for as long as was waited
for the last; then one is, and if that times out too, for twice as long, to a minute. In between there is no hit. The
first answer ends it. It is logged once when it begins, and once when it ends.

## Releases
LMCache 0.3.9 to 0.5.6.

## Upstream
None known.

## Remove when
LMCache's lookup transport backs off after a timeout.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix import clock, notice, probe
from kvfix.correction import after, around, corrected, instead
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType

SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: An answer that took longer, and is 0, is none: to 0.3.15 a lookup does not tell. Seconds; they wait for three.
SLOW = 0.5


class Pause:
    """When the next lookup may be tried, in seconds of the clock."""

    def __init__(self) -> None:
        self.failures = 0
        self.length = self.until = 0.0

    def answered(self) -> None:
        if self.length:
            notice.warn("KVF015: LMCache's worker answers lookups again; hits are looked for as before")
        self.failures, self.length, self.until = 0, 0.0, 0.0

    def failed(self, waited: float) -> None:
        self.failures += 1
        if self.failures < 2:
            return
        if not self.length:
            notice.warn(
                "KVF015: LMCache's worker did not answer two lookups in time: none is tried for a while, requests go "
                "on without a hit. Is the worker alive, and its cache healthy?"
            )
        self.length = min(max(waited, SHORTEST_PAUSE, 2 * self.length), LONGEST_PAUSE)
        self.until = clock.now() + self.length


def pause_of(holder: Any) -> Pause:
    """The pause that this client or transport keeps."""
    if not hasattr(holder, "_kvfix_pause"):
        holder._kvfix_pause = Pause()
    found: Pause = holder._kvfix_pause
    return found


def correct(module: ModuleType) -> Callable[..., Any]:
    def unless_paused(transport: Any, message: Any) -> Generator[None, Any, Any] | None:
        return instead([]) if clock.now() < transport._kvfix_pause.until else None

    def send_and_recv_all(transport: Any, answers: Any, message: Any) -> Any:
        pause = pause_of(transport)
        if answers:
            pause.answered()
        else:
            pause.failed(transport.timeout_ms / 1000)
        return answers

    known = 'hasattr(transport, "_kvfix_pause")'
    inside, outside = after(send_and_recv_all, when=f"not answers or {known}"), around(unless_paused, when=known)
    return lambda original: corrected(original, [inside, outside])


def correct_lookup(module: ModuleType) -> Callable[..., Any]:
    @around
    def lookup(client: Any, *args: Any, **kwargs: Any) -> Generator[None, Any, Any]:
        pause, begun = pause_of(client), clock.now()
        if begun < pause.until:
            return 0
        hit = yield
        waited = clock.now() - begun
        if hit == 0 and waited > SLOW:
            pause.failed(waited)
        else:
            pause.answered()
        return hit

    return lookup


class _Silent:
    """A socket whose other end is dead."""

    def __init__(self, error: type[Exception]) -> None:
        self.asked = 0
        self.error = error

    def send_multipart(self, *_: Any, **__: Any) -> None:
        self.asked += 1

    def recv(self) -> bytes:
        raise self.error


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """Three lookups, one after the other, of a worker that does not answer. Wrong is to wait for all."""
    socket = _Silent(module.zmq.Again)
    transport = module.ZmqReqRepClientTransport.__new__(module.ZmqReqRepClientTransport)
    vars(transport).update(
        _world_size=1,
        sockets=[socket],
        timeout_ms=3000,
        encoder=SimpleNamespace(encode=lambda part: b""),
        _recreate_all_sockets=lambda: None,
    )
    for _ in range(3):
        hook(transport, [[], [], "", ""])
    return socket.asked == 3


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.v1.rpc.zmq_transport",
            function="ZmqReqRepClientTransport.send_and_recv_all",
            broken=">=0.4.1",
            shows_bug=shows_bug,
            correct=correct,
        ),
        Patch(
            dist="lmcache",
            module="lmcache.v1.lookup_client.lmcache_lookup_client",
            function="LMCacheLookupClient.lookup",
            broken=">=0.3.9,<0.4.1",
            shows_bug=probe.cannot_tell,  # it takes the wait
            correct=correct_lookup,
        ),
    ),
)
