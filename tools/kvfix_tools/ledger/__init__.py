"""The ledger with the events and rules that only tools use. No process of an engine sees these events alone.

Import RULES from here to get all rules.
"""

from kvfix.ledger.rules import RULES, Rule
from kvfix_tools.ledger import rules as rules  # the import registers the rules

__all__ = ["RULES", "Rule"]
