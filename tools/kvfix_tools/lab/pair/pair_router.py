"""The router between two engines (pair.py), which works like vLLM's toy proxy.

The router lets prefill compute the prompt and one token, and sends the request with prefill's `kv_transfer_params` to
decode. In push mode it may send the request to both engines at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix_tools.lab.pair.pair_engine import PairEngine, Params

if TYPE_CHECKING:
    from kvfix_tools.lab.pair.pair import Pair

#: Faults in the parameters of a request for decode, which come from the router or a client.
MALFORMED: dict[str, Callable[[Params], Params]] = {
    "no_blocks": lambda params: {**params, "remote_block_ids": []},
    "no_host": lambda params: {key: value for key, value in params.items() if key != "remote_host"},
    "no_request": lambda params: {key: value for key, value in params.items() if key != "remote_request_id"},
    "other_tp_size": lambda params: {**params, "tp_size": 2 * params["tp_size"]},
    "no_tp_size": lambda params: {key: value for key, value in params.items() if key != "tp_size"},
    "fewer_blocks": lambda params: {**params, "remote_block_ids": [_blocks(params)[:-1]]},
    "more_blocks": lambda params: {**params, "remote_block_ids": [[*_blocks(params), 1]]},
    "flat_blocks": lambda params: {**params, "remote_block_ids": _blocks(params)},
    "odd_blocks": lambda params: {**params, "remote_block_ids": [["x"] * len(_blocks(params))]},
    "far_blocks": lambda params: {**params, "remote_block_ids": [[1 << 20] * len(_blocks(params))]},
    "other_engine": lambda params: {**params, "remote_engine_id": "other"},
    "other_port": lambda params: {**params, "remote_port": 1},
    "decode_too": lambda params: {**params, "do_remote_decode": True, "do_remote_prefill": False},
    "more_ranks": lambda params: {**params, "pp_size": 2},
    "odd_engine": lambda params: {**params, "remote_engine_id": ["other"]},
    "alone": lambda params: {**params, "do_remote_prefill": False},
    "nothing": lambda params: {},
}


def _blocks(params: Params) -> list[Any]:
    return list(params["remote_block_ids"][0]) if params["remote_block_ids"] else []


class _Asked(NamedTuple):
    """A client's request. at_once: both engines have it."""

    prompt: list[int]
    max_tokens: int
    at_once: bool


class Router:
    """The router. counts: its actions."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self.counts: Counter[str] = Counter()
        self._asked: dict[str, _Asked] = {}
        #: Steps from an answer to the next message, and messages to send: (step, request, parameters).
        self.takes = 0
        self._to_send: list[tuple[int, str, Params | None]] = []
        #: The last parameters of each request, and the faults for the next parameters.
        self._params: dict[str, Params] = {}
        self.malformed: list[str] = []
        #: {request: token that ends its text}
        self.stops: dict[str, int] = {}
        #: {request: number of its ids}. vLLM adds a suffix to the router's id.
        self._ids: Counter[str] = Counter()

    @property
    def busy(self) -> bool:
        return bool(self._to_send)

    @property
    def asked(self) -> list[str]:
        return list(self._asked)

    @property
    def sent(self) -> list[str]:
        """Requests that the router can send to decode again."""
        return list(self._params)

    @property
    def waiting(self) -> set[str]:
        """Requests that prefill has answered and that decode does not have yet."""
        return {each[1] for each in self._to_send}

    def ask(self, name: str, prompt: list[int], max_tokens: int, prefill_tokens: int, at_once: bool) -> None:
        """Send a request. prefill_tokens: tokens that prefill generates. at_once: send it to both engines."""
        prefill = self._pair.prefill
        self._asked[name] = _Asked(prompt, max_tokens, at_once)
        self._admit(prefill, self._id(name), prompt, prefill_tokens, prefill.connector.for_prefill(name))
        if at_once:
            self.counts["at_once"] += 1
            self._to_send.append((self._pair.network.now, name, prefill.connector.for_decode(name, None)))

    def ask_decode(self, name: str, prompt: list[int], max_tokens: int = 1) -> None:
        """Send a request only to decode."""
        self._admit(self._pair.decode, f"{name}-{2:08x}", prompt, max_tokens, None)

    def ask_again(self, name: str) -> None:
        """Abort a request and begin it again."""
        asked = self._asked[name]
        self.counts["asked_again"] += 1
        self.ask(name, asked.prompt, asked.max_tokens, 1, asked.at_once)

    def send_again(self, name: str) -> None:
        """Send a request to decode again, as a router does without an answer."""
        params = self._params.get(name)
        if params is not None:
            self.counts["sent_again"] += 1
            asked = self._asked[name]
            self._admit(self._pair.decode, self._id(name), asked.prompt, asked.max_tokens, dict(params))

    def malform(self, what: str) -> None:
        """Put this fault into the parameters of the next request for decode (MALFORMED)."""
        self.malformed.append(what)

    def forget(self, name: str) -> None:
        """Drop a request whose client has disconnected."""
        self._to_send = [each for each in self._to_send if each[1] != name]

    def forget_params(self) -> None:
        self._params.clear()

    def answered(self, engine: PairEngine, output: Any) -> None:
        """Handle the end of a request in an engine."""
        name = output.request_id.rpartition("-")[0]
        params = output.kv_transfer_params
        aborted = "abort" in str(output.finish_reason).lower()
        if engine is not self._pair.prefill or name not in self._asked or aborted:
            return
        if params is not None:
            self.counts["leases"] += engine.connector.keeps(output.request_id)
            self.counts["stored_tokens"] += params.get("remote_num_tokens", 0)
        if not self._asked[name].at_once:
            due = self._pair.network.now + self.takes
            self._to_send.append((due, name, engine.connector.for_decode(name, params)))

    def tick(self) -> None:
        """Begin a step: send the messages that are due."""
        now = self._pair.network.now
        due = [each for each in self._to_send if each[0] <= now]
        self._to_send = [each for each in self._to_send if each[0] > now]
        for _, name, params in due:
            asked = self._asked[name]
            if params and self.malformed:
                params = MALFORMED[self.malformed.pop(0)](params)
                self.counts["malformed"] += 1
                self._pair.may_fail()
            elif params:
                self._params[name] = params
            self._admit(self._pair.decode, self._id(name), asked.prompt, asked.max_tokens, dict(params or {}))

    def _id(self, name: str) -> str:
        self._ids[name] += 1
        return f"{name}-{self._ids[name]:08x}"

    def _admit(self, engine: PairEngine, name: str, prompt: list[int], most: int, params: Params | None) -> None:
        if engine.is_free(name):
            sampling: dict[str, Any] = {"extra_args": {"kv_transfer_params": params}} if params else {}
            of_client = name.rpartition("-")[0]
            if of_client in self.stops:
                sampling["stop_token_ids"] = [self.stops[of_client]]
            # a copy, as in two processes: vLLM shortens the prompt of a prefill (`_truncate_request_for_prefill`)
            engine.admit(name, list(prompt), most, sampling=sampling)
