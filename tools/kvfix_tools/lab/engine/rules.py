"""The rules in rules.md (LAB...), which only the lab can check. kvfix.ledger.rules has the other rules (KVR...)."""

import re
from pathlib import Path
from typing import NamedTuple


class LabRule(NamedTuple):
    code: str
    name: str
    doc: str


_TEXT = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
RULES = tuple(LabRule(*found) for found in re.findall(r"(?ms)^## (\S+) (\S+)\n\n(.*?)\s*(?=^## |\Z)", _TEXT))
(
    WRONG_CONTENT, LOAD_CAME_SHORT, NEVER_ENDS, NOT_STORED, HARMED_BY_OTHERS, NOT_FOUND, FAULT_OF_KVFIX, WRONG_TEXT,
    NO_REQUEST_CAN_MOVE, STORED_AGAINST_POLICY, ASKED_AGAIN, WRONG_KIND, NEVER_GIVEN_BACK, NOT_ITS_TO_CHANGE,
    NOT_IN_FLIGHT, BLOCKS_HELD, THREAD_DIED, KEPT_OF_PEER, COROUTINE_RAISED,
    AWAITED_IN_VAIN, DIFFERS_FROM_MODEL, MEMORY_HELD, NEVER_RESTS,
) = RULES  # fmt: skip
