"""The engine almost stops if one worker is dead or slow: every lookup waits for the whole timeout, in every step.

Symptom: There is hardly any throughput, because each step of the scheduler takes `lookup_timeout_ms` (3 seconds). The
log repeats `Timeout occurred for rank 0, recreating all sockets. Error: Resource temporarily unavailable`.

Cause: A lookup that times out returns no hit, and LMCache does not remember the timeout. The next lookup waits for
the whole timeout again. The waiting lookup blocks the scheduler, so all running requests wait.

Fix: After two timeouts in a row, the fix pauses lookups for as long as the last lookup waited. During a pause, lookups
find no hit and do not wait. After the pause, LMCache sends the next lookup. If this lookup times out too, the next
pause is twice as long, up to a minute. If the worker replies, the pauses end. kvfix logs when pauses begin and end.
- Releases: LMCache 0.3.9 to 0.5.6.
- Remove when: LMCache's lookup transport backs off after a timeout.
"""

from kvfix import clock
from kvfix.fixes.api import LOOKUP_CLIENT, ZMQ_CLIENT, Any, Fix, Steps, engine_log, fix_around, stubs

SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 60.0


class Pause:
    """A pause of the lookups. until: the time at which the pause ends, in seconds of `clock.now()`."""

    def __init__(self) -> None:
        self.failures = 0
        self.length = self.until = 0.0

    def answered(self) -> None:
        if self.length:
            engine_log.warning("KVF015: LMCache's worker answers lookups again; the pause has ended")
        self.failures, self.length, self.until = 0, 0.0, 0.0

    def failed(self, waited: float) -> None:
        self.failures += 1
        if self.failures < 2:
            return
        if not self.length:
            engine_log.warning(
                "KVF015: LMCache's worker did not answer two lookups in time. kvfix pauses lookups, and requests run "
                "without a hit. Check that the worker runs and that its cache is healthy."
            )
        self.length = min(max(waited, SHORTEST_PAUSE, 2 * self.length), LONGEST_PAUSE)
        self.until = clock.now() + self.length


def pause_of(holder: Any) -> Pause:
    pause: Pause = vars(holder).setdefault("_kvfix_pause", Pause())
    return pause


@fix_around()
def fix(transport: Any, message: Any) -> Steps:
    pause = vars(transport).get("_kvfix_pause")
    if pause is not None and clock.now() < pause.until:
        return []
    answers = yield
    if not answers:
        pause_of(transport).failed(transport.timeout_ms / 1000)
    elif pause is not None:
        pause.answered()


@fix_around()
def fix_lookup(client: Any, *args: Any, **kwargs: Any) -> Steps:
    pause, begun = pause_of(client), clock.now()
    if begun < pause.until:
        return 0
    hit = yield
    waited = clock.now() - begun
    if hit == 0 and waited > 0.5:  # up to LMCache 0.3.15, a timeout (3 s) also returns 0
        pause.failed(waited)
    else:
        pause.answered()


def shows_bug(hook: Any, module: Any) -> bool:
    """Send three lookups to a worker that does not answer. With the bug, the client waits for all three."""
    socket = stubs.Stub(send_multipart=stubs.Calls(), recv=stubs.Calls(module.zmq.Again()))
    transport = module.ZmqReqRepClientTransport.__new__(module.ZmqReqRepClientTransport)
    vars(transport).update(
        _world_size=1, sockets=[socket], timeout_ms=3000, encoder=stubs.Stub(encode=lambda part: b""),
        _recreate_all_sockets=lambda: None,
    )  # fmt: skip
    for _ in range(3):
        hook(transport, [[], [], "", ""])
    return len(socket.send_multipart) == 3


FIX = Fix(
    ZMQ_CLIENT.send_and_recv_all(broken=">=0.4.1", probe=shows_bug, fix=fix),
    LOOKUP_CLIENT.lookup(broken=">=0.3.9,<0.4.1", fix=fix_lookup, order=1),
    effect="hang",
    evidence={"KVD203": "", "KVD207": "", "KVR012": ""},
)
