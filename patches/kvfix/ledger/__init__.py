"""A ledger of tokens: typed events in, findings out. Pure: it imports neither vLLM nor LMCache nor torch.

Every known bug is a wrong balance of tokens: computed by vLLM, held by the external cache, promised, granted, loaded
and stored. Live hooks, log lines, recorded dumps and the lab feed their events to the same model.
"""

from kvfix.ledger.history import Finding, History, Ledger
from kvfix.ledger.rules import RULES, Rule

__all__ = ["RULES", "Finding", "History", "Ledger", "Rule"]
