"""Probes: what goes through a connector's hooks becomes events of the ledger, in the flight recorder and, in modes
`check` and `strict`, before the invariants.

Only modes that need it import this package. Whatever goes wrong in it is said once, and the engine goes on.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvfix import arrival, patching
from kvfix.probes import alarm, hooks, recorder

if TYPE_CHECKING:
    from types import ModuleType

    from kvfix.choice import Choice

Violation = alarm.Violation


def settle(module: ModuleType, choice: Choice | None) -> None:
    """Probes of this module in, or all out where the choice has none. Idempotent."""
    if choice is None or not choice.probes:
        remove_all()
        return
    alarm.mode = choice.mode
    hooks.layers = choice.layers
    if module.__name__ == arrival.FACTORY:
        hooks.watch_factory(module.KVConnectorFactory)
    else:
        hooks.watch_scheduler(module.Scheduler)


def remove_all() -> None:
    """Every probe out; what was recorded is forgotten."""
    patching.detach(hooks.KEY)
    hooks.leave_factory()
    if "kvfix.probes.signals" in sys.modules:
        from kvfix.probes import signals

        signals.remove()
    recorder.restart()
    alarm.restart()
