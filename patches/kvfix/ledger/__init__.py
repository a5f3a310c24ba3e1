"""A ledger of tokens: typed events in, verdicts out. Pure: it imports neither vLLM nor LMCache nor torch.

Every bug that kvfix knows is a wrong balance: how many tokens vLLM has computed, how many the external cache has,
how many were promised, granted, loaded and stored. Live hooks, log lines, recorded dumps and the lab bring their
events to the same model.
"""

from kvfix.ledger.book import Finding, Ledger, Story
from kvfix.ledger.rules import RULES, Rule

__all__ = ["RULES", "Finding", "Ledger", "Rule", "Story"]
