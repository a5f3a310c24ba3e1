"""`make drill` reports a violation that occurs only with fixes, and is worse than all violations without fixes."""

import pytest

from maintain import drill


@pytest.mark.parametrize(
    ("released", "fixed", "found"),
    [
        ({"KVR022"}, {"LAB003"}, []),  # the fixes turn wrong output into a hang
        ({"KVR011"}, {"LAB003", "KVR009"}, []),
        ({"LAB003"}, {"LAB003"}, []),
        ({"LAB003"}, {"LAB001", "LAB003"}, ["LAB001"]),
        ({"LAB020"}, {"LAB003"}, ["LAB003"]),
        (set(), {"LAB020"}, ["LAB020"]),
        ({"LAB001"}, {"LAB007"}, ["LAB007"]),  # `make drill` always reports an error in the code of a fix
        ({"LAB006"}, {"LAB016"}, ["LAB016"]),  # EFFECTS lists neither rule, so LAB016 counts as wrong output
    ],
)
def test_a_new_rule_is_worse_by_its_effect(released: set[str], fixed: set[str], found: list[str]) -> None:
    assert drill.worse(released, fixed) == found
