"""The rules in rules.md (LAB...), which only the lab can check. kvfix.ledger.rules has the other rules (KVR...)."""

from pathlib import Path
from typing import NamedTuple


class LabRule(NamedTuple):
    code: str
    name: str
    doc: str


def _rule(section: str) -> LabRule:
    heading, _, doc = section.partition("\n\n")
    code, name = heading.split()
    return LabRule(code, name, doc.rstrip())


RULES = tuple(map(_rule, Path(__file__).with_suffix(".md").read_text(encoding="utf-8").split("\n## ")[1:]))
(
    WRONG_CONTENT, LOAD_CAME_SHORT, NEVER_ENDS, NOT_STORED, HARMED_BY_OTHERS, NOT_FOUND, FAULT_OF_KVFIX, WRONG_TEXT,
    NO_REQUEST_CAN_MOVE, STORED_AGAINST_POLICY, ASKED_AGAIN, WRONG_KIND, NEVER_GIVEN_BACK, NOT_ITS_TO_CHANGE,
    NOT_IN_FLIGHT, BLOCKS_HELD, THREAD_DIED, KEPT_OF_PEER, COROUTINE_RAISED,
    AWAITED_IN_VAIN, DIFFERS_FROM_MODEL, MEMORY_HELD, NEVER_RESTS,
) = RULES  # fmt: skip
