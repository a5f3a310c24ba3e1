"""Play a schedule with real NIXL (nixl_real.py) and with the lab's model: each difference in a step is a finding.

If the model has garbage in a slot, because the source of a transfer changed or the peer has ended, NIXL may have any
content in this slot.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from kvfix.ledger import Finding
from kvfix_tools.lab.engine import rules
from kvfix_tools.lab.engine.memory import GARBAGE
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.pair.pair import Pair

State = dict[str, Any]


class Watched(Pair):
    """Two engines whose states are recorded. before: an earlier pair, with whose states these states are compared."""

    def __init__(self, options: Options, before: "Watched | None" = None) -> None:
        self.states: list[State] = []
        #: The first difference: (step, what differs, value before, value now).
        self.differs: tuple[int, str, Any, Any] | None = None
        self._before = before
        #: Number of the engines' steps at the last recorded state.
        self._taken = -1
        super().__init__(options)

    def tick(self) -> None:
        moves = self.network.busy or self.steps != self._taken
        super().tick()
        if not (moves or self.network.busy):
            self.states.append(self.states[-1])  # both engines wait for a timeout
            return
        self._taken = self.steps
        self.states.append(state := _state(self))
        step = len(self.states) - 1
        if self._before is not None and self.differs is None:
            others = self._before.states
            was = others[step] if step < len(others) else {}
            self.differs = next(((step, *each) for each in _differences(was, state)), None)


def _state(pair: Pair) -> State:
    state: State = {"findings": [found.code for found in pair.findings], "steps": pair.steps}
    for engine in pair.engines:
        for name, request in engine.requests.items():
            last = request.output_token_ids[-1] if request.num_output_tokens else None
            state[f"{name} of {engine.name}"] = request.status.name, request.num_output_tokens, last
        slots = engine.slots
        state[f"the blocks of {engine.name}"] = slots.read(range(len(slots)), 0, len(slots) * slots.block_size)
    return state


def _differences(was: State, has: State) -> list[tuple[str, Any, Any]]:
    if was == has:
        return []
    found = []
    for about in {**was, **has}:
        one, other = was.get(about), has.get(about)
        if one == other:
            continue
        if isinstance(one, list) and isinstance(other, list) and len(one) == len(other) and about != "findings":
            wrong = next((at for at, each in enumerate(one) if each not in (other[at], GARBAGE)), None)
            if wrong is None:
                continue
            about, one, other = f"slot {wrong} of {about}", one[wrong], other[wrong]
        found.append((about, one, other))
    return found


def play_both(options: Options, play: Callable[[Pair], Any]) -> Any:
    """Return the result of `play` with real NIXL. Its findings include the differences from the model."""
    model = Watched(dataclasses.replace(options, real_transfers=False))
    play(model)
    real = Watched(options, model)
    done = play(real)
    differs = real.differs
    if differs is None and model.log != real.log:
        pairs = zip([*model.log, None], [*real.log, None], strict=False)
        step, one, other = next((at, *pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
        differs = step, "the events", one, other
    if differs is None:
        return done
    step, about, one, other = differs
    rule, message = rules.DIFFERS_FROM_MODEL, f"step {step}: {about}: {other} with NIXL, {one} with its model"
    found = Finding(rule.code, rule.name, "violated", "", message, real.log[-1][1])
    return done._replace(findings=[*done.findings, found])
