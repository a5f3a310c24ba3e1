"""Pairs of releases, as the lab knows them (kvfix_tools/lab/options.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfix import applicability
from tests.doctor.sites import MP, V1, look, say, serve, site


@pytest.mark.parametrize(
    ("lmcache", "transfer", "upstream", "status"),
    [
        ("0.3.10", V1, "", "ok"),
        ("0.5.6", V1, "", "ok"),
        ("0.5.6", MP, "", "ok"),
        ("0.4.4", MP, "", "ok"),
        ("0.3.10", MP, "", "problem"),
        ("0.5.6", MP, "1", "problem"),
        ("0.4.7", MP, "1", "problem"),
    ],
)
def test_pairs_with_the_installed_vllm(
    lmcache: str, transfer: dict[str, str], upstream: str, status: str, tmp_path: Path
) -> None:
    """vLLM 0.32 has a copy of the multi-process connector; it takes it where LMCache's is missing, or if asked to."""
    environment = {"LMCACHE_USE_UPSTREAM_MP": upstream} if upstream else {}
    (line,) = say(look(serve(transfer), site(tmp_path, lmcache), environment=environment), "releases")
    assert line.status == status
    assert status == "ok" or "install lmcache>=0.4.5" in line.do


def test_a_release_that_the_lab_has_not_run_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = applicability.fingerprints()
    monkeypatch.setattr(
        applicability, "fingerprints", lambda: {**known, "lmcache": {**known["lmcache"], "releases": ["0.5.5"]}}
    )
    (line,) = say(look(serve(V1), site(tmp_path)), "releases")
    assert (line.status, "kvfix does not know LMCache 0.5.6, only releases up to 0.5.5" in line.what) == (
        "unchecked",
        True,
    )
