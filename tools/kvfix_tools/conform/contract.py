"""The contract of a KV connector: the rules that `kvfix conform` tests, from contract.md."""

import re
from pathlib import Path
from typing import NamedTuple


class Rule(NamedTuple):
    """A rule of the contract. `_OF_CONTENT` says which rule wrong KV violates."""

    slug: str
    title: str
    doc: str
    proof: str  # a count (request_events.py). If the count is 0, the rule was not tested
    codes: tuple[str, ...]  # rules of the lab and the ledger. A scenario that violates any of them violates this rule


_TEXT = Path(__file__).with_name("contract.md").read_text(encoding="utf-8")
_RULE = re.compile(r"## (\S+): (.+)\n\n((?:.+\n)+)\n- proof: (\w+)(?:\n- codes: (.+))?")
RULES = tuple(
    Rule(slug, title, doc, proof, tuple(codes.split())) for slug, title, doc, proof, codes in _RULE.findall(_TEXT)
)
SLUGS = {rule.slug: rule for rule in RULES}
#: Rules about contents. Wrong KV in a scenario of one of these rules violates this rule; elsewhere `granted`.
_OF_CONTENT = {
    "granted", "stored", "preempted", "aborted", "blocks-in-use", "failed-load", "reset", "groups", "ahead", "drafts",
    "restart",
}  # fmt: skip


def of_finding(code: str, about: str) -> str:
    """Return the rule that a finding violates. about: the rule of the scenario."""
    if code == "KVR011" and about == "parameters":  # `parameters` is about exceptions
        return about
    content = about if about in _OF_CONTENT else "granted"
    return next((rule.slug for rule in RULES if code in rule.codes), content)
