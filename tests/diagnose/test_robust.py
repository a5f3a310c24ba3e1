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
PIECES = st.one_of(st.binary(max_size=40), st.sampled_from(mutate.RUBBISH))
CHANGE = st.tuples(st.integers(0, 5), st.integers(0, 10**6), st.integers(0, 400), PIECES)


@given(
    picked=st.lists(st.integers(0, 10**6), min_size=1, max_size=25),
    changes=st.lists(CHANGE, max_size=12),
    join=st.sampled_from(mutate.JOINS),
)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_a_mutated_log_is_read_to_its_end(picked: list[int], changes: list[mutate.Change], join: bytes) -> None:
    lines = mutate.corpus()
    mutate.check(mutate.mutated(join.join(lines[number % len(lines)] for number in picked), changes))


def test_the_first_logs_of_the_corpus() -> None:
    found = [code for number in range(EXAMPLES * 2) for code in mutate.check(mutate.draw(0, number), 1 << 12)]
    assert {"KVD101", "KVD203", "KVD206"} <= set(found)


@given(log=st.binary(max_size=4000))
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_any_bytes_at_all(log: bytes) -> None:
    diagnosed(log)
