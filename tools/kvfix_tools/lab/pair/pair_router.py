"""The router between two engines (pair.py), which works like vLLM's toy proxy.

The router lets prefill compute the prompt and one token, and sends the request with prefill's `kv_transfer_params` to
decode. In push mode it may send the request to both engines at once.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix_tools.lab.fuzz.parameters import MALFORMED, Params
from kvfix_tools.lab.pair.pair_engine import PairEngine
from kvfix_tools.lab.steps import continued

if TYPE_CHECKING:
    from kvfix_tools.lab.pair.pair import Pair


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
        self.asked: dict[str, _Asked] = {}
        #: Steps from an answer to the next message, and messages to send: (step, request, parameters).
        self._takes = 0
        self._to_send: list[tuple[int, str, Params | None]] = []
        #: {request that the router can send to decode again: its last parameters}
        self.sent: dict[str, Params] = {}
        #: The faults for the next parameters.
        self.malformed: list[str] = []
        #: {request: token that ends its text}
        self._stops: dict[str, int] = {}
        #: {request: number of its ids}. vLLM adds a suffix to the router's id.
        self._ids: Counter[str] = Counter()
        self.ask_at_once = partial(self.ask, at_once=True)

    @property
    def waiting(self) -> set[str]:
        """Requests that prefill has answered and that decode does not have yet."""
        return {each[1] for each in self._to_send}

    def ask(
        self, name: str, prompt: list[int], max_tokens: int = 1, prefill_tokens: int = 1, at_once: bool = False
    ) -> None:
        """Send a new request. prefill_tokens: tokens that prefill generates. at_once: send it to both engines."""
        prefill = self._pair.prefill
        self.asked[name] = _Asked(prompt, max_tokens, at_once)
        self._admit(prefill, self._id(name), prompt, prefill_tokens, prefill.connector.for_prefill(name))
        if at_once:
            self.counts["at_once"] += 1
            self._to_send.append((self._pair.network.now, name, prefill.connector.for_decode(name, None)))

    def ask_decode(self, name: str, prompt: list[int], max_tokens: int = 1) -> None:
        """Send a request only to decode."""
        self._admit(self._pair.decode, f"{name}-{2:08x}", prompt, max_tokens, None)

    def ask_again(self, name: str) -> None:
        """Give a request up, tell both engines, and begin the request again."""
        self._pair.abort(name)
        asked = self.asked[name]
        self.counts["asked_again"] += 1
        self.ask(name, asked.prompt, asked.max_tokens, at_once=asked.at_once)

    def send_again(self, name: str) -> None:
        """Send a request to decode again, as a router does without an answer."""
        params = self.sent.get(name)
        if params is not None:
            self.counts["sent_again"] += 1
            asked = self.asked[name]
            self._admit(self._pair.decode, self._id(name), asked.prompt, asked.max_tokens, dict(params))

    def ends_at_once(self, name: str, prompt: list[int]) -> None:
        """The first token of this request ends its text. The request has not arrived yet."""
        self._stops[name] = continued(prompt, 1)[-1]

    def router_takes(self, steps: int) -> None:
        """From now on the router takes so many steps for an answer."""
        self._takes = steps

    def malform(self, what: str) -> None:
        """Put this fault into the parameters of the next request for decode (MALFORMED)."""
        self.malformed.append(what)

    def forget(self, name: str) -> None:
        self._to_send = [each for each in self._to_send if each[1] != name]

    def answered(self, engine: PairEngine, output: Any) -> None:
        name = output.request_id.rpartition("-")[0]
        params = output.kv_transfer_params
        aborted = "abort" in str(output.finish_reason).lower()
        if engine is not self._pair.prefill or name not in self.asked or aborted:
            return
        if params is not None:
            self.counts["leases"] += engine.connector.keeps(output.request_id)
            self.counts["stored_tokens"] += params.get("remote_num_tokens", 0)
        if not self.asked[name].at_once:
            due = self._pair.network.now + self._takes
            self._to_send.append((due, name, engine.connector.for_decode(name, params)))

    def tick(self) -> None:
        """Begin a step: send the messages that are due."""
        now = self._pair.network.now
        due = [each for each in self._to_send if each[0] <= now]
        self._to_send = [each for each in self._to_send if each[0] > now]
        for _, name, params in due:
            asked = self.asked[name]
            if params and self.malformed:
                params = MALFORMED[self.malformed.pop(0)](params)
                self.counts["malformed"] += 1
                self._pair.may_fail()
            elif params:
                self.sent[name] = params
            self._admit(self._pair.decode, self._id(name), asked.prompt, asked.max_tokens, dict(params or {}))

    def _id(self, name: str) -> str:
        self._ids[name] += 1
        return f"{name}-{self._ids[name]:08x}"

    def _admit(self, engine: PairEngine, name: str, prompt: list[int], most: int, params: Params | None) -> None:
        if engine.is_free(name):
            sampling: dict[str, Any] = {"extra_args": {"kv_transfer_params": params}} if params else {}
            of_client = name.rpartition("-")[0]
            if of_client in self._stops:
                sampling["stop_token_ids"] = [self._stops[of_client]]
            # a copy, as in two processes: vLLM shortens the prompt of a prefill (`_truncate_request_for_prefill`)
            engine.do("admit", name, list(prompt), most, sampling=sampling)
