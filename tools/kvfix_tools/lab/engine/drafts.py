"""Speculative decoding as vLLM's model runner does it, without a draft model.

A step computes the last sampled token and the drafts after it. It accepts the first drafts that equal the tokens that
the model samples, and samples one more token after these. The KV of rejected drafts stays in its slots until a later
step writes there. The tokens before the drafts determine how many drafts are right.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.outputs import DraftTokenIds

from kvfix import scheduling
from kvfix_tools.lab.engine.memory import VOCABULARY, next_token
from kvfix_tools.lab.options import Options


class Drafter:
    """Proposes drafts after each sampled token, and knows at which token the next step of each request begins.

    With asynchronous scheduling the scheduler assumes that all drafts of the last step were accepted, and does not have
    their tokens. The runner has the number of accepted drafts, and the tokens (v1/spec_decode/utils.py 0.32.0:816).
    """

    #: Drafts proposed, accepted and rejected.
    counts: Counter[str]

    def __init__(self, options: Options) -> None:
        self._options = options
        #: {request that had drafts in the last step: its first token in this step}
        self._starts: dict[str, int] = {}
        self._next_starts: dict[str, int] = {}
        #: {request: drafts that the last step has proposed}
        self._last: dict[str, list[int]] = {}
        self._proposed: dict[str, list[int]] = {}

    def begin(self, output: Any) -> None:
        self._starts, self._next_starts = self._next_starts, {}
        self._last, self._proposed = self._proposed, {}
        for name in (*scheduling.resumed(output), *(new.req_id for new in output.scheduled_new_reqs)):
            self._starts.pop(name, None)
            self._last.pop(name, None)

    def start(self, name: str, computed: int) -> int:
        """Return the first token of this request in the step. computed: the scheduler's number of computed tokens."""
        return self._starts.get(name, computed)

    def verify(
        self, name: str, scheduled: list[int], right: Sequence[int], end: int, misled: bool
    ) -> tuple[int, list[int]]:
        """Return how many of the drafts after token `end` are accepted, and the contents that all drafts write.

        - scheduled: the drafts of the scheduler, with -1 for each unknown token
        - right: the right contents, up to the last draft or further
        - misled: the step has read wrong KV, so it samples none of the drafts
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
        """Propose drafts after token `at` of this request, which was just sampled."""
        options = self._options
        if not options.drafter:
            return
        contents = right(name, at + options.drafts)
        drafts = options.drafts
        if options.drafter == "ngram" and not options.async_scheduling:
            drafts = contents[at] % (options.drafts + 1)  # an n-gram drafter does not always find all drafts
        self._proposed[name] = proposed = []
        wrong = 0
        for content in contents[at : at + drafts]:
            wrong = wrong or hash((content, 1)) % 100 >= options.acceptance
            proposed.append((next_token(content) + wrong) % VOCABULARY)

    def take(self) -> DraftTokenIds:
        """Return the drafts of the last step, as vLLM's runner does without asynchronous scheduling."""
        return DraftTokenIds(list(self._proposed), [list(drafts) for drafts in self._proposed.values()])
