"""Turn the hook calls of a connector into events of the ledger.

The flight recorder keeps the events, and in modes `check` and `strict` the rules check them. Mode `fix` does not import
this package. After an error in the package, the engine continues, and kvfix logs the error once.
"""

from __future__ import annotations

from types import ModuleType

from kvfix import applying
from kvfix.connector_events import hooks, signals, violations, watchdog
from kvfix.session import session

Violation = violations.Violation


def settle(module: ModuleType) -> None:
    """Add the wrappers to this module, or remove all wrappers if the configuration needs none. Idempotent."""
    if session.config is None or not session.config.watches:
        remove_all()
    elif hasattr(module, "Scheduler"):
        hooks.watch_scheduler(module.Scheduler)
    else:
        hooks.watch_factory(module.KVConnectorFactory)


def remove_all() -> None:
    """Remove every wrapper and everything that was recorded."""
    applying.detach(hooks.KEY)
    applying.detach(hooks.AUDIT)
    hooks.release_factory()
    signals.remove()
    watchdog.stop()
    session.restart_recording()
