"""Make docs/diagnose.svg for the README: the output of kvfix-diagnose for the log of a real engine that died.

python -m maintain documentation.diagnose_picture tests/diagnose/logs/crash-0.3.10.log.gz > docs/diagnose.svg
"""

import gzip
import io
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from kvfix_tools.diagnose import report_text
from kvfix_tools.diagnose.diagnosis import diagnosed

NAME = "engine.log"
COLUMNS = 118


class _Terminal(Console):
    """A console that breaks long lines at the edge of the picture, as a terminal does."""

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        super().print(*objects, **options)


def picture(log: bytes) -> str:
    found = diagnosed(log, NAME)
    console = _Terminal(
        record=True, width=COLUMNS, force_terminal=True, color_system="truecolor", file=io.StringIO(), highlight=False
    )
    console.print(f"[bold]$ kvfix-diagnose {NAME}[/]")
    report_text.print_all(found, found.findings, console, everything=False)
    svg = console.export_svg(title="kvfix-diagnose", unique_id="kvfix")
    # Remove rich's font, which the reader's browser would fetch from another site. Any monospaced font is good enough.
    lines = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def main(log: Path) -> None:
    sys.stdout.write(picture(gzip.decompress(log.read_bytes())))
