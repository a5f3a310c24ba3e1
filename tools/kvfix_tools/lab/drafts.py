"""Speculative decoding as vLLM's model runner does it, without a draft model.

A step computes the last sampled token and the drafts after it. The first drafts that are what the model samples there
are accepted, and one token more is sampled after them. The KV of the rejected ones stays in its slots until a later
step writes there. Which drafts are right is a function of the tokens before them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.outputs import DraftTokenIds

from kvfix import scheduling
from kvfix_tools.lab.memory import VOCABULARY, next_token
from kvfix_tools.lab.options import Options


class Drafter:
    """Proposes drafts after each sampled token, and knows where the next step of each request really begins.

    With asynchronous scheduling a step is scheduled as if all drafts of the last one were accepted, and without their
    tokens. The runner has both (v1/spec_decode/utils.py 0.32.0:816 for a request that had drafts in the last step).
    """

    #: Drafts proposed, accepted and rejected.
    counts: Counter[str]

    def __init__(self, options: Options) -> None:
        self._options = options
        #: Where the step begins for each request that had drafts in the last one.
        self._starts: dict[str, int] = {}
        self._next_starts: dict[str, int] = {}
        #: request -> drafts that the last step has proposed
        self._last: dict[str, list[int]] = {}
        self._proposed: dict[str, list[int]] = {}

    def begin(self, output: Any) -> None:
        """A step begins for which the scheduler hands out this."""
        self._starts, self._next_starts = self._next_starts, {}
        self._last, self._proposed = self._proposed, {}
        for name in (*scheduling.resumed(output), *(new.req_id for new in output.scheduled_new_reqs)):
            self._starts.pop(name, None)
            self._last.pop(name, None)

    def start(self, name: str, computed: int) -> int:
        """The first token of this request in the step. computed: what the scheduler takes for computed."""
        return self._starts.get(name, computed)

    def verify(
        self, name: str, scheduled: list[int], right: Sequence[int], end: int, misled: bool
    ) -> tuple[int, list[int]]:
        """How many of the drafts after token `end` are accepted, and what all of them leave in their slots.

        scheduled: what the scheduler has of the drafts, -1 in place of tokens. right: the right contents, at least as
        far as the drafts go. misled: the step has read wrong KV; what it samples is no draft.
        """
        options = self._options
        drafts = self._last.get(name, scheduled)[: len(scheduled)] if options.async_scheduling else scheduled
        accepted = 0
        while not misled and accepted < len(drafts) and drafts[accepted] == next_token(right[end + accepted - 1]):
            accepted += 1
        self.counts.update(
            drafts_proposed=len(drafts), drafts_accepted=accepted, drafts_rejected=len(drafts) - accepted
        )
        self.counts[f"steps_with_{len(drafts)}_drafts"] += 1
        self.counts["no_draft_accepted" if not accepted else "all_drafts_accepted"] += accepted in (0, len(drafts))
        if options.async_scheduling:
            self._next_starts[name] = end + accepted
        contents = list(right[end : end + accepted])
        for draft in drafts[accepted:]:
            contents.append(hash((contents[-1] if contents else right[end - 1], draft)))
        return accepted, contents

    def propose(self, name: str, at: int, right: Callable[[str, int], list[int]]) -> None:
        """Drafts after token `at` of this request, which has just been sampled."""
        options = self._options
        contents = right(name, at + options.drafts)
        drafts = options.drafts
        if options.drafter == "ngram" and not options.async_scheduling:
            drafts = contents[at] % (options.drafts + 1)  # it proposes what it finds
        self._proposed[name] = proposed = []
        wrong = 0
        for content in contents[at : at + drafts]:
            wrong = wrong or hash((content, 1)) % 100 >= options.acceptance
            proposed.append((next_token(content) + wrong) % VOCABULARY)

    def take(self) -> DraftTokenIds:
        """What the last step has proposed, as vLLM's runner hands it out without asynchronous scheduling."""
        return DraftTokenIds(list(self._proposed), [list(drafts) for drafts in self._proposed.values()])
