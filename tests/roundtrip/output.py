"""Return the output of `kvfix roundtrip --device cpu --json`, run in this process."""

import contextlib
import io
import json
from typing import Any

from kvfix_tools.roundtrip import command


def output_of(*arguments: str) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = command.main([*arguments, "--device", "cpu", "--json"])
    answer: dict[str, Any] = json.loads(printed.getvalue())
    assert answer["exit"] == code
    return answer
