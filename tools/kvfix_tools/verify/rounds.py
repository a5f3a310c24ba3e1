"""Send the requests of `kvfix verify`. The server `reference` computes KV. The server `subject` loads KV."""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvfix_tools.verify.client import Reply, Server
from kvfix_tools.verify.compare import SPARE, Judge, difference, has_numbers, is_decided
from kvfix_tools.verify.prompts import TOKENS, Maker, Prompt, Sizes
from kvfix_tools.verify.report import ALONE, UNDER_LOAD, Case, Confirmation, Outcome, by_kind

STORING = 20.0  # maximum seconds to wait for free blocks, because a connector may still store the last requests' blocks
#: To find the chunk size, kvfix sends SURVEY prompts up to SURVEYS times, because a connector may store KV late.
SURVEY, SURVEYS = 8, 3
SUSPECTS = 3  # maximum number of kinds of prompts to test again, those with the largest differences first
FEWEST_CONTROLS = 12  # with fewer controls (defined in compare.py), the run cannot tell wrong KV from noise
EVERY = 4  # under load, kvfix sends and aborts one extra request per 4 requests. One of 4 answers is longer (`_tokens`)
NEVER_ASKED = "vLLM never asked a connector. Start vLLM with --kv-transfer-config and kv_role kv_both"
NOT_COUNTED = (
    "/metrics does not count the requests, because PROMETHEUS_MULTIPROC_DIR is set for the server, or several servers"
    " are behind this URL"
)
NO_HIT = "vLLM asked the connector for each prompt, but no token came from the connector"


class Inconclusive(Exception):
    """The run can prove nothing. The exception's text says why, and what to check."""


@dataclass
class Rounds:
    subject: Server  # the tested URL: its answers use KV from the connector
    reference: Server  # computes KV and has the metrics. This is the server of `--decode`, or else `subject`
    maker: Maker
    sizes: Sizes  # if `chunk` is 0, `_survey` finds the chunk size
    capacity: int  # number of tokens whose KV fits on the GPU; 0 if unknown
    clients: int
    say: Callable[[str], None]  # function that shows the progress
    flushed_by: str = ""
    not_numbers: int = 0

    def run(self, requests: int, others: list[str]) -> Outcome:
        """Run all rounds. others: names of the base model and its adapters, without the tested model."""
        self.say("finding the chunk size")
        self._survey()
        cases = self._compute(list(self.maker.prompts(self.maker.kinds(requests), self.sizes)))
        judge = Judge([case.control for case in cases if case.control is not None])
        if len(judge.controls) < FEWEST_CONTROLS:
            raise Inconclusive(
                f"only {len(judge.controls)} prompts were answered from the GPU's own prefix cache, but"
                f" {FEWEST_CONTROLS} are needed to know the noise."
                " Start vLLM with --enable-prefix-caching and enough GPU blocks"
            )
        self.flush()
        for number, case in enumerate(cases):
            self.say(f"from the connector: {number} of {len(cases)} prompts")
            self._ask_alone(case)
        self.say(f"from the connector: {len(cases)} prompts at once")
        preemptions = self._ask_under_load(cases)
        outcome = Outcome(self.sizes, judge, cases, preemptions, self.flushed_by, self.not_numbers)
        if not outcome.first_test:
            outcome.confirmations = [self._confirm(*suspect, outcome) for suspect in self._suspects(outcome)]
        outcome.shared_with = self._shared_with(cases, others)
        return outcome

    def _survey(self) -> None:
        """Check that the connector has hits. Unless the user gave the chunk size, find a size that divides each hit."""
        sizes = self.sizes._replace(chunk=self.sizes.chunk or self.sizes.block)
        kinds = (["many chunks"] if self.maker.vocabulary else ["text"]) * SURVEY
        prompts = list(self.maker.prompts(kinds, sizes))
        before = self.reference.metrics()
        computed = [self.reference.ask(prompt, 1) for prompt in prompts]
        if self.reference.metrics_after(before).requests == before.requests:
            raise Inconclusive(NOT_COUNTED)
        for attempt in range(SURVEYS):
            time.sleep(attempt)
            self.flush()
            warm = [self._measured(self.subject, prompt, 1) for prompt in prompts]
            if any(reply.hits != 0 for reply in warm):
                break
        else:
            raise Inconclusive(NEVER_ASKED if self.reference.metrics().queried == before.queried else NO_HIT)
        both = zip(computed, warm, strict=True)
        self.not_numbers = sum(has_numbers(one.answer) and not has_numbers(other.answer) for one, other in both)
        found = math.gcd(*(reply.hits or 0 for reply in warm))
        is_chunk = found >= self.sizes.block and found % self.sizes.block == 0
        self.sizes = sizes._replace(chunk=self.sizes.chunk or (found if is_chunk else sizes.block))
        if not self.sizes.fits:
            raise Inconclusive(
                f"two chunks of {self.sizes.chunk} tokens do not fit into the model's context of {sizes.context} tokens"
            )

    def _shared_with(self, cases: list[Case], others: list[str]) -> str:
        """Return one of `others` that has a hit for a prompt which kvfix sent only to the tested model, or ""."""
        hits = [case.prompt for case in cases if case.hits]
        for other in others if hits else []:
            self.flush()
            if self._measured(self.subject, hits[0], 1, other).counted:
                return other
        return ""

    def _compute(self, prompts: list[Prompt]) -> list[Case]:
        """Compute all prompts. Then measure controls (compare.py), while the GPU's prefix cache has the prompts' KV."""
        cases: list[Case] = []
        for group in self._groups(prompts):
            self.say(f"cold: {len(cases)} of {len(prompts)} prompts")
            computed = []
            for number, prompt in enumerate(group, len(cases)):
                tokens = self._tokens(number)
                reply, again = (self._measured(self.reference, prompt, tokens) for _ in range(2))
                case = Case(prompt, tokens, reply)
                if self._is_clean(again):
                    case.control = difference(reply.answer, again.answer).size
                if not reply.counted:
                    computed.append(case)
            controls = [case for case in computed if case.control is not None]
            for case, reply in zip(controls, self._at_once(self.reference, controls), strict=True):
                case.control = max(case.control or 0.0, difference(case.computed.answer, reply.answer).size)
            cases += computed
        return cases

    def _ask_alone(self, case: Case) -> None:
        case.warm = self._measured(self.subject, case.prompt, case.tokens)
        case.cached[ALONE] = difference(case.computed.answer, case.warm.answer)

    def _ask_under_load(self, cases: list[Case]) -> int:
        self.flush()
        before = self.reference.metrics()
        for case, reply in zip(cases, self._at_once(self.subject, cases, aborts=True), strict=True):
            case.cached[UNDER_LOAD] = difference(case.computed.answer, reply.answer)
        return int(self.reference.metrics().preemptions - before.preemptions)

    def _suspects(self, outcome: Outcome) -> list[tuple[str, str]]:
        """Return (kind of prompt, mode) for kinds with differences above the limit, the largest difference first.
        If a kind exceeds the limit in both modes, return only (kind, ALONE)."""
        worst = {
            kind: (max(case.cached[mode].size for case in cases), mode)
            for mode in (UNDER_LOAD, ALONE)
            for kind, cases in by_kind(outcome.above(mode)).items()
        }
        ranked = sorted(worst.items(), key=lambda item: -item[1][0])
        return [(kind, mode) for kind, (_, mode) in ranked[:SUSPECTS]]

    def _confirm(self, kind: str, mode: str, outcome: Outcome) -> Confirmation:
        needed = outcome.judge.needed(outcome.compared)
        self.say(f"confirming: {kind}, {mode}")
        cases = self._compute(list(self.maker.prompts([kind] * (needed + SPARE), self.sizes)))
        confirmation = Confirmation(kind, mode, 0, 0, needed)
        if mode == UNDER_LOAD:
            self._ask_under_load(cases)
        else:
            self.flush()
        for case in cases:
            if mode == ALONE:
                self._ask_alone(case)
            confirmation.asked += 1
            confirmation.differs += outcome.judge.exceeds(case.cached[mode].size)
            if is_decided(confirmation.differs, confirmation.asked, needed):
                break
        return confirmation

    def flush(self) -> None:
        """Empty the GPU's prefix cache with POST /reset_prefix_cache, or with other prompts that use all blocks."""
        until = time.monotonic() + STORING
        done = self.reference.reset()
        while done is False and time.monotonic() < until:
            tiny = self.maker.cued("", [], 8) if self.maker.vocabulary else Prompt("", self.maker.text(8))
            self.reference.ask(tiny, 1)  # causes engine steps, because a connector completes stores only in a step
            time.sleep(0.1)
            done = self.reference.reset()
        if done:
            self.flushed_by = "POST /reset_prefix_cache"
            return
        if not self.capacity:
            raise Inconclusive(
                "kvfix cannot empty the GPU's prefix cache: the server has no /reset_prefix_cache, and its metrics lack"
                " the number of blocks. Start the server with VLLM_SERVER_DEV_MODE=1"
            )
        fillers = self.fillers
        self.flushed_by = f"{fillers} other prompts each time, which use all GPU blocks"
        self.say(f"emptying the GPU's prefix cache with {fillers} prompts")
        kind = "whole chunks" if self.maker.vocabulary else "text"
        prompts = self.maker.prompts([kind] * fillers, self.sizes._replace(chunk=self.sizes.block))
        with ThreadPoolExecutor(self.clients) as pool:
            list(pool.map(lambda prompt: self.reference.ask(prompt, 1), prompts))

    @property
    def fillers(self) -> int:
        """Number of prompts that together need 10 % more blocks than the GPU has."""
        return math.ceil(1.1 * self.capacity / (self.sizes.longest - self.sizes.block)) + 1

    def _at_once(self, server: Server, cases: list[Case], aborts: bool = False) -> list[Reply]:
        """Send all requests from several clients. Return the answers. aborts: also send and abort extra requests."""
        clients = self.clients
        if aborts and self.can_preempt:  # send twice as many requests at once as fit into the GPU's blocks
            clients = max(clients, 2 * self.capacity * len(cases) // sum(case.computed.prompt_tokens for case in cases))
        with ThreadPoolExecutor(clients) as pool:
            replies = []
            for number, case in enumerate(cases):
                if aborts and number % EVERY == 0:
                    pool.submit(server.abort, cases[-1 - number].prompt, 2 * self.sizes.block)
                replies.append(pool.submit(server.ask, case.prompt, case.tokens))
            return [reply.result() for reply in replies]

    def _measured(self, server: Server, prompt: Prompt, tokens: int, model: str = "") -> Reply:
        """Return the answer, with the number of tokens from the connector unless other clients hide this number."""
        before = self.reference.metrics()
        reply = server.ask(prompt, tokens, model)
        after = self.reference.metrics_after(before)
        if after.queried - before.queried <= reply.prompt_tokens and after.requests - before.requests <= 1:
            return reply._replace(counted=int(after.hits - before.hits))
        return reply

    def _is_clean(self, reply: Reply) -> bool:
        """Return True if the connector had no hit. If the hit is unknown, accept prompts of N blocks + 1 token."""
        return reply.prompt_tokens % self.sizes.block == 1 if reply.counted is None else reply.counted == 0

    @property
    def can_preempt(self) -> bool:
        """True if 24 concurrent requests need more blocks than the GPU has."""
        return 0 < self.capacity <= 24 * self.sizes.longest

    def _tokens(self, number: int) -> int:
        """Return the length of an answer. Some answers are a block longer, to cause preemptions."""
        return self.sizes.block + TOKENS if self.can_preempt and number % EVERY == 0 else TOKENS

    def _groups(self, prompts: list[Prompt]) -> Iterator[list[Prompt]]:
        """Yield groups of prompts. All prompts of one group together fit into half of the GPU's blocks."""
        group: list[Prompt] = []
        room = (self.capacity or math.inf) / 2 - self.sizes.longest
        for prompt in prompts:
            group.append(prompt)
            if sum(each.length or self.sizes.longest for each in group) > room:
                yield group
                group = []
        if group:
            yield group
