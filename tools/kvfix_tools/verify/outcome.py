"""The results of a run of `kvfix verify`. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfix_tools.verify.client import Reply
from kvfix_tools.verify.compare import Difference, Judge
from kvfix_tools.verify.prompts import Prompt, Sizes

#: Modes in which prompts are sent with KV from the connector.
ALONE, UNDER_LOAD = "alone", "under load"


@dataclass
class Case:
    """One prompt.

    control: difference between two answers without the connector; None without a clean pair of answers.
    hits: tokens from the connector in the warm round; None if requests of other clients hide the number.
    cached: {mode: difference between the computed answer and the answer with KV from the connector}.
    """

    prompt: Prompt
    tokens: int
    computed: Reply
    control: float | None = None
    hits: int | None = 0
    warm: Reply | None = None
    cached: dict[str, Difference] = field(default_factory=dict)


@dataclass
class Confirmation:
    """The second test of one kind in one mode."""

    kind: str
    mode: str
    differs: int
    asked: int
    needed: int

    @property
    def holds(self) -> bool:
        return self.differs >= self.needed


@dataclass
class Outcome:
    """The results of a run.

    error_rate: bound of the probability that a healthy run is called different.
    expected, hits: minimum and actual number of tokens from the connector in the warm round. hits is None if requests
        of other clients hide the number.
    shared_with: an adapter that got KV of another adapter.
    not_numbers: number of prompts of the survey whose answer became NaN with KV from the connector. NaN stays in the
    engine's
        memory, and spoils the later rounds.
    """

    sizes: Sizes
    judge: Judge
    cases: list[Case]
    first_test: bool
    confirmations: list[Confirmation]
    error_rate: float
    expected: int
    hits: int | None
    preemptions: int
    flushed_by: str
    shared_with: str = ""
    not_numbers: int = 0

    @property
    def is_different(self) -> bool:
        found = self.first_test or self.shared_with or self.not_numbers
        return bool(found or any(each.holds for each in self.confirmations))

    def above(self, mode: str, kind: str = "") -> list[Case]:
        """Return the cases whose difference is above the limit."""
        return [
            case for case in self.cases
            if kind in ("", case.prompt.kind) and mode in case.cached and self.judge.exceeds(case.cached[mode].size)
        ]  # fmt: skip
