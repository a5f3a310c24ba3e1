"""Run the job of a program that start.py starts: `python PROGRAM JOB.json`."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run(main: Callable[[dict[str, Any]], None], engine_is_here: bool = True) -> None:
    """Run main with the job. engine_is_here: the engine runs in this process, and LMCache's threads never end."""
    try:
        main(json.loads(Path(sys.argv[1]).read_text()))
    finally:
        if engine_is_here:
            if sys.exc_info()[0]:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
