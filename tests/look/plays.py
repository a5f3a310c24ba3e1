"""The lab's engine in a separate process: it plays a scenario repeatedly, without kvfix, and prints the result.

`plays.py LMCACHE SLUG`. With a third argument, the file of a flag, it holds a request of that schedule until the file
is there.
"""

import sys
import time
from pathlib import Path

from kvfix_tools.lab import runner
from kvfix_tools.lab.engine.lab_engine import LabEngine
from kvfix_tools.lab.scenario import find

lmcache, slug, *flag = sys.argv[1:]
runner.prepare(lmcache)
scenario = find(slug)


with runner.quiet():
    if flag:
        engine = LabEngine(scenario.options)
        engine.admit("held", list(range(600)), max_tokens=40)
        engine.step(3)
        print("holds", flush=True)
        while not Path(flag[0]).exists():
            time.sleep(0.01)
        engine.run()
        print("ended", flush=True)
        time.sleep(600)
    while True:
        print("violated" if scenario.played().findings else "clean", flush=True)
