"""Whatever happened to a log on its way, it is read to its end, and reported. KVFIX_TEST_EXAMPLES sets how often.

100,000 of them: `python -m tests.diagnose.mutate --count 100000`.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfix_tools.diagnose.diagnosis import diagnosed
from tests.diagnose import mutate

EXAMPLES = int(os.environ.get("KVFIX_TEST_EXAMPLES", "300"))


def test_the_first_logs_of_the_corpus() -> None:
    found = [code for number in range(EXAMPLES * 2) for code in mutate.check(mutate.draw(0, number), 1 << 12)]
    assert {"KVD101", "KVD203", "KVD206"} <= set(found)


@given(log=st.binary(max_size=4000))
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_any_bytes_at_all(log: bytes) -> None:
    diagnosed(log)
