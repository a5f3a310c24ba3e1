"""What a run of `kvfix verify` has found. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfix_tools.verify.client import Reply
from kvfix_tools.verify.compare import Difference, Judge
from kvfix_tools.verify.prompts import Prompt, Sizes

#: How prompts are asked with KV from the connector.
ALONE, UNDER_LOAD = "alone", "under load"


@dataclass
class Case:
    """One prompt. control: the difference between two answers without the connector; None if there is no clean one.
    hits: tokens from the connector in the warm round; None if requests of other clients hide it.
    cached: {mode: the difference between the computed answer and the one with KV from the connector}"""

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
    """error_rate: the bound for a healthy run to be called different. expected, hits: tokens from the connector in the
    warm round, at least and in fact; None if requests of other clients hide them. shared_with: an adapter that was
    served KV of another."""

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

    @property
    def is_different(self) -> bool:
        return bool(self.first_test or self.shared_with or any(each.holds for each in self.confirmations))

    def above(self, mode: str, kind: str = "") -> list[Case]:
        """Cases whose difference is above the limit."""
        return [
            case for case in self.cases
            if kind in ("", case.prompt.kind) and mode in case.cached and self.judge.exceeds(case.cached[mode].size)
        ]  # fmt: skip
