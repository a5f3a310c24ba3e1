"""No decode engine can connect to a prefill engine any more: one malformed handshake ends the thread that answers.

Symptom: Decode engines log `NIXL transfer failure: handshake_setup_failed` with `Resource temporarily unavailable`. All
loads from prefill fail. Prefill looks healthy, but has logged one `KeyError` in thread `nixl_handshake_listener`.

Cause: A handshake message names a rank, which comes from `tp_size` and `pp_size` of a request's parameters. The
listener thread looks up the rank in a dictionary (base_scheduler.py 0.32.0:376). If the dictionary does not have the
rank, the thread ends with a KeyError. The thread also ends at any message that it cannot decode (:362).

Fix: The thread opens its socket again and continues. The engine that sent the message gets no reply.
- Releases: vLLM 0.32.0 and 0.33.0. In 0.26.0 the code was read, not tested.
- Remove when: vLLM catches exceptions of a single message.
"""

from kvfix.fixes.api import AT_START, NIXL_BASE_SCHEDULER, PRIVATE, Any, Fix, engine_log, fix_calls, note


@fix_calls
def _nixl_handshake_listener(function: Any, *args: Any, **kwargs: Any) -> Any:
    while True:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: PERF203
            ready, stop = args[1:3] if len(args) > 2 else (None, None)
            if ready is None or stop is None or not ready.is_set():  # the thread could not open its socket
                raise
            note(__name__, "a malformed handshake was ignored")
            engine_log.warning(f"KVF316: ignored a handshake that cannot be answered: {type(error).__name__}: {error}")
            if stop.is_set():
                return None


FIX = Fix(
    NIXL_BASE_SCHEDULER._nixl_handshake_listener(broken=">=0.26", fix=_nixl_handshake_listener),
    effect="hang",
    attaches=AT_START,  # a thread that already runs continues to run the function without the fix
    no_patch=PRIVATE,
)
