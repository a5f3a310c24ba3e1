"""Which fix cures what the ledger finds: the rule, words of its message, and the codes.

Several may: of one message there are several causes. The report names those that the installed release needs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvfix.ledger import Finding

_V1 = r"^(load_specs|_request_trackers|_unfinished_requests|_requests_priority|lookup_client\.reqs_status) "

#: rule, what its message must match, fixes
CURES: list[tuple[str, str, tuple[str, ...]]] = [
    ("KVR001", "", ("KVF001",)),
    ("KVR002", "", ("KVF001",)),
    ("KVR003", "", ("KVF001", "KVF003")),
    ("KVR004", "", ("KVF115", "KVF003", "KVF023")),
    ("KVR006", "", ("KVF014",)),
    ("KVR007", "", ("KVF102",)),
    ("KVR008", "", ("KVF107", "KVF008")),
    ("KVR009", _V1, ("KVF005",)),
    ("KVR009", r"^lookup_client\.(aborted_lookups|reqs_status) ", ("KVF010",)),
    ("KVR009", r"^fetched chunks of the worker ", ("KVF012",)),
    ("KVR009", r"^pins of the worker ", ("KVF009", "KVF005")),
    ("KVR009", r"^worker_adapter\.finished_stores ", ("KVF109",)),
    ("KVR009", r"^worker_adapter\._returned_finished ", ("KVF117",)),
    ("KVR009", r"^scheduler_adapter\.", ("KVF105",)),
    ("KVR009", r"^read locks of the server ", ("KVF105", "KVF114", "KVF116")),
    ("KVR010", "", ("KVF104",)),
    ("KVR011", "Mismatch in tokens to load", ("KVF001", "KVF003")),
    ("KVR011", "Preempted request", ("KVF002",)),
    ("KVR011", "is preempted but was not given a load spec", ("KVF002",)),
    ("KVR011", "^request_finished: AssertionError$", ("KVF004",)),
    ("KVR011", "Request tracker for request_id", ("KVF101",)),
    ("KVR011", "KeyError", ("KVF011",)),
    ("KVR011", "object of type 'NoneType' has no len", ("KVF006",)),
    ("KVR011", "'NoneType' object is not", ("KVF006",)),
    ("KVR011", "^wait_for_save: AssertionError", ("KVF008",)),
    ("KVR011", "^update_from_output: AssertionError", ("KVF201",)),
    ("KVR012", "", ("KVF015",)),
]


class Cure(NamedTuple):
    """A fix that this installation needs, or has: `verdict` and `reason` as `kvfix status` tells them."""

    code: str
    slug: str
    verdict: str
    reason: str


def candidates(finding: Finding) -> list[str]:
    """Codes of the fixes that cure findings like this one, in whatever release."""
    found = [codes for rule, words, codes in CURES if rule == finding.code and re.search(words, finding.message)]
    return list(dict.fromkeys(code for codes in found for code in codes))


def cures(finding: Finding) -> list[Cure]:
    """Of the candidates, those that are applied here, could be, or are not known to be needless."""
    wanted = candidates(finding)
    if not wanted:
        return []
    from kvfix import verdict
    from kvfix.fix import catalogue

    return [
        Cure(row.code, row.slug, row.verdict, row.reason)
        for fix in catalogue()
        if fix.code in wanted
        for row in verdict.rows(fix)
        if row.verdict in ("applied", "applicable", "failed", "unknown")
    ]
