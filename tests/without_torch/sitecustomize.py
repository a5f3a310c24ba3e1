"""`make quick`: a program that a test starts ends where it imports torch, and makes a file that says so (quick.py)."""

import os
import sys
from typing import Any

wanted = os.environ.get("KVFIX_TEST_WANTS_TORCH", "")


def end(event: str, arguments: Any) -> None:
    if event == "import" and arguments[0].partition(".")[0] == "torch":
        open(wanted, "w").close()
        os._exit(77)


if wanted:
    sys.addaudithook(end)

# The user's own, if there is one, takes the place of this file.
sys.path.remove(os.path.dirname(__file__))
ours = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # noqa: F401
except ImportError:
    sys.modules["sitecustomize"] = ours
