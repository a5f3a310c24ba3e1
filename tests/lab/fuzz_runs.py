"""Runs of the fuzzer. What came of them is in `result`."""

import gc
from math import inf

from kvfix_tools.lab import runner
from kvfix_tools.lab.fuzz import fuzz
from tests.healthy import own_blocks

with runner.quiet():
    from kvfix_tools.lab.lab_engine import LabEngine

result = {"plain": {}}
own_blocks()
for connector in ("v1", "mp"):
    done = fuzz(connector, range(150), inf, fixes=False, plain=True, shrinking=0)
    kinds = sorted({f"{v.rule} {v.message.split()[1]}: {v.message.split(': ', 1)[1]}" for v in done.violations})
    result["plain"][connector] = {"seeds": done.seeds, "nothing": done.tested_nothing, "violations": kinds}
a, b = (fuzz("v1", range(5, 9), inf, fixes=False, shrinking=0) for _ in range(2))
result["same"] = (a.steps, a.counts) == (b.steps, b.counts)
result["happened"] = {name: fuzz(name, range(60), inf, fixes=False, shrinking=0).counts for name in ("v1", "mp")}
gc.collect()
result["engines"] = sum(type(each) is LabEngine for each in gc.get_objects())
none = fuzz("v1", range(0), inf, fixes=False)
result["nothing"] = none.tested_nothing
found = fuzz("v1", range(3), inf, fixes=False, shrinking=inf).violations
result["shrunk"] = [[v.rule, len(v.schedule.steps)] for v in found]
