"""Run the lab's engine without kvfix: `plays.py LMCACHE FLAG`. A second request comes when the file FLAG exists."""

import sys
import time
from pathlib import Path

from kvfix_tools.lab import runner
from kvfix_tools.lab.engine.lab_engine import LabEngine
from kvfix_tools.lab.scenario import find

lmcache, flag = sys.argv[1:]
runner.prepare(lmcache)
with runner.quiet():
    engine = LabEngine(find("abort-while-waiting").options)
    engine.admit("held", list(range(600)), max_tokens=40)
    engine.step(3)
    print("holds", flush=True)
    while not Path(flag).exists():
        time.sleep(0.01)
    engine.run()
    engine.admit("later", list(range(600, 900)), max_tokens=40)
    engine.run()
    print("ended", flush=True)
    time.sleep(600)
