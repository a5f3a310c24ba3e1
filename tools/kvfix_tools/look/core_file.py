"""`kvfix look --core FILE`: show the stacks of a core file with PyStack. It does not read variables."""

import json as jsonlib
import re
import subprocess
import sys

from kvfix_tools.dump import gather
from kvfix_tools.look.looking import of_stack

#: Time limit in seconds. A core file of an engine has many gigabytes.
_LONGEST = 600
_THREAD = re.compile(r"^Traceback for thread (\d+)")
_FRAME = re.compile(r'^\s+\(Python\) File "(.*)", line (\d+), in (.+)$')


def look(file: str, json: bool) -> int:
    """Return 0 if no thread is in a connector hook, 1 if one is, 2 for an unreadable file, 77 without PyStack."""
    pystack = gather.program("pystack")
    if pystack is None:
        why = "PyStack, which reads core files, is not installed. Run: pip install pystack"
        print(f"kvfix look: {why}", file=sys.stderr)
        return 77
    command = [pystack, "--no-color", "core", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST, check=False)
    threads = stacks(done.stdout)
    if not threads:
        lines = (done.stderr or done.stdout).strip().splitlines()
        print(f"kvfix look: {file}: {lines[-1] if lines else 'no Python thread'}", file=sys.stderr)
        return 2
    found = [{"thread": thread, **of_stack(frames)} for thread, frames in threads.items()]
    in_hook = [each for each in found if each["hook"]]
    if json:
        print(jsonlib.dumps({"schema": 1, "kind": "core", "threads": found}, indent=2))
        return int(bool(in_hook))
    for each in in_hook:
        print(f"thread {each['thread']} was in {each['hook']}, at {each['stack'][0]}")
    if not in_hook:
        print(f"none of {len(found)} threads was in a connector hook")
    for each in found:
        print(f"\nthread {each['thread']}, innermost frame first:")
        print("\n".join(f"    {frame}" for frame in each["stack"]))
    return int(bool(in_hook))


def stacks(text: str) -> dict[int, list[tuple[str, str, int]]]:
    """Return {thread: its frames, innermost first}. PyStack prints the innermost frame last."""
    found: dict[int, list[tuple[str, str, int]]] = {}
    frames: list[tuple[str, str, int]] = []
    for line in text.splitlines():
        thread, frame = _THREAD.match(line), _FRAME.match(line)
        if thread:
            frames = found.setdefault(int(thread[1]), [])
        elif frame:
            frames.insert(0, (frame[3], frame[1], int(frame[2])))
    return {thread: frames for thread, frames in found.items() if frames}
