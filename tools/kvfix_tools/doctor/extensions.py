"""Try to load the compiled extensions with the installed torch, in a child process that may crash."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

LIMIT = 180  # Time limit in seconds for all libraries. torch alone takes 2 to 20 s.
_CHILD = r"""
import ctypes, json, os, sys
places, targets = json.loads(sys.argv[1])
sys.path[:0] = places
def say(**what): print("@" + json.dumps(what), flush=True)
try:
    import torch
except BaseException as error:
    say(torch=None, error=f"{type(error).__name__}: {error}")
    sys.exit()
facts = {"version": str(torch.__version__), "cuda": None, "available": False}
try:
    facts["cuda"] = torch.version.cuda or (torch.version.hip and "ROCm " + torch.version.hip)
    facts["available"] = bool(torch.cuda.is_available())
except Exception as error:
    facts["error"] = f"{type(error).__name__}: {error}"
say(torch=facts)
for name in targets:
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        code = 0
        try:
            ctypes.CDLL(name, mode=os.RTLD_NOW) if "/" in name else __import__(name)
        except BaseException as error:
            say(name=name, error=f"{type(error).__name__}: {error}")
            code = 3
        os._exit(code)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        say(name=name, signal=os.WTERMSIG(status))
    elif not status:
        say(name=name, error="")
"""


class Tried(NamedTuple):
    """The result of loading the compiled extensions."""

    torch: dict[str, Any] | None  # facts about torch; None if torch cannot be imported
    errors: dict[str, str]  # {library or module: error; "" if it loads}
    why: str  # why kvfix did not try every library; "" if it tried all


def attempt(places: list[str], libraries: list[Path], modules: list[str], limit: float = LIMIT) -> Tried:
    """Import torch, then open each library and import each module. places: first folders of the child's sys.path."""
    targets = [*map(str, libraries), *modules]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps([places, targets])],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder, start_new_session=True,
            env={**os.environ, "KVFIX": "off", "PYTHONDONTWRITEBYTECODE": "1", "CUDA_MODULE_LOADING": "LAZY"},
        )  # fmt: skip
        late = False
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            late = True
        finally:  # end the child and its forks
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if late:
            output, _ = process.communicate()
    torch: dict[str, Any] | None = None
    errors, why, code = dict[str, str](), "", process.returncode
    for line in output.splitlines():
        reported = json.loads(line[1:]) if line.startswith("@") else {}
        if "torch" in reported:
            torch, why = reported["torch"], reported.get("error", "")
        elif reported:
            crashed = reported.get("signal")
            errors[reported["name"]] = f"crashed with {signal.Signals(crashed).name}" if crashed else reported["error"]
    if late:
        why = f"loading did not finish in {limit:g} s"
    elif torch is None and not why:
        end = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"ended the process ({code})"
        why = f"import torch {end}"
    return Tried(torch, errors, why)
