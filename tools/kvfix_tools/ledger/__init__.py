"""The ledger with the events and rules that only tools have. No process of an engine sees these events alone.

A tool that reads all rules takes them from here.
"""

from kvfix.ledger.rules import RULES, Rule
from kvfix_tools.ledger import rules as rules  # they are registered

__all__ = ["RULES", "Rule"]
