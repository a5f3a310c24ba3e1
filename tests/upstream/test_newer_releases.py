"""Patches for vLLM also apply to newer releases. If a patch does not apply, put `vllm-<release>.patch` next to it."""

from pathlib import Path

import pytest

from kvfix_tools import upstream
from maintain.scenario_matrix import VLLM, VLLM_RELEASES
from tests.conftest import ROOT
from tests.upstream import patched

PATCHES = [row for row in upstream.ready() if row.dist == "vllm"]


@pytest.mark.parametrize("release", (ROOT / VLLM_RELEASES[1]).read_text().split())
@pytest.mark.parametrize("row", PATCHES, ids=lambda row: str(row.slug))
def test_the_patch_applies(row: upstream.Ready, release: str, tmp_path: Path) -> None:
    places = list((ROOT / VLLM / release).glob("lib/python*/site-packages"))
    if not places:
        pytest.skip(f"vLLM {release} is not in {VLLM}: `requirements/matrix` fetches it")
    if row.version != release and row.path.with_name(f"vllm-{release}.patch").exists():
        pytest.skip(f"this bug has a separate patch: vllm-{release}.patch")
    assert "Applied patch vllm/" in patched.git_apply(row.path, places, tmp_path, "--exclude=tests/*", "--verbose")
