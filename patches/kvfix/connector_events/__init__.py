"""Turn the hook calls of a connector into events of the ledger.

The flight recorder keeps the events, and in modes `check` and `strict` the rules check them. Mode `fix` does not import
this package. After an error in the package, the engine continues, and kvfix logs the error once.
"""

from kvfix.connector_events.hooks import remove_all, settle
from kvfix.connector_events.violations import Violation

__all__ = ["Violation", "remove_all", "settle"]
