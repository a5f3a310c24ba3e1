from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfix_tools.diagnose.diagnosis import diagnosed
from tests.conftest import ROOT
from tests.diagnose.lines import real

HEALTHY = (
    "healthy-0.5.6", "healthy-0.5.6-debug", "healthy-plain-0.5.6", "healthy-quiet-0.5.6", "healthy-disk-0.5.6",
    "mp-0.5.6", "mp-0.5.6.server",
)  # fmt: skip
WINDOWS = {20: 3, 50: 7, 100: 11, 200: 17}  # {lines of an excerpt: lines between the starts of two excerpts}
ERRORS = (
    b"(APIServer pid=7) ERROR 11-21 10:01:10 [serving_chat.py:257] Error in preprocessing prompt inputs\n",
    b"[2026-11-21 10:01:10,123] LMCache ERROR: Failed to send heartbeat once (x.py:7:lmcache.v1.x)\n",
    b"ERROR:    Exception in ASGI application\n",
    b"ValueError: This model's maximum context length is 8192 tokens.\n",
)
FOREIGN = sorted((Path(__file__).parent / "foreign").iterdir())  # texts that are not engine logs
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]


def parts(whole: list[bytes], step: int) -> Iterator[list[bytes]]:
    for cut in range(1, len(whole), step):
        yield whole[:cut]
        yield whole[cut:]
    for size, apart in WINDOWS.items():
        for start in range(0, max(1, len(whole) - size), apart):
            yield whole[start : start + size]


def found(text: bytes, general: bool = False) -> list[str]:
    """Return the codes of findings that are not notes. general: add notes of records with `general`, except KVD1041."""
    return [
        each.rule.code
        for each in diagnosed(text).findings
        if not each.is_note or (general and each.rule.general and each.rule.code != "KVD1041")
    ]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_has_no_finding(name: str) -> None:
    whole = real(name).splitlines(keepends=True)
    for part in (whole, *parts(whole, 5)):
        assert found(b"".join(part), general=True) == [], (whole.index(part[0]), len(part))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.decode()[:40])
@pytest.mark.parametrize("name", HEALTHY)
def test_an_error_that_does_no_harm_is_no_finding(name: str, error: bytes) -> None:
    whole = real(name).splitlines(keepends=True)
    for part in (whole, *list(parts(whole, 50))[::5]):
        for text in ([error, *part], [*part, error]):
            assert found(b"".join(text)) == [], (whole.index(part[0]), len(part))


@pytest.mark.parametrize("path", [*FOREIGN, *PAGES], ids=lambda path: path.name)
def test_what_is_no_log_of_an_engine_has_no_finding(path: Path) -> None:
    whole = path.read_bytes().splitlines(keepends=True)
    assert found(b"".join(whole)) == []
    for part in parts(whole, 10):
        assert found(b"".join(part)) == [], part[0]
    for line in whole if path not in PAGES else ():  # kvfix's pages quote log messages that have findings
        assert found(line) == [], line
