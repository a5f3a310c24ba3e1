"""The fixes of the multi-process connectors and of vLLM, on the real functions of every release that has them."""

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

import kvfix
from kvfix import fix
from tests.conftest import Zygote

PATCHES = [
    (found.code, patch)
    for found in fix.catalogue()
    for patch in found.patches
    if found.code >= "KVF100" and patch.correct
]
KNOWN = json.loads(Path(kvfix.__file__).with_name("fingerprints.json").read_text())


def releases_with(target: str, dist: str) -> list[str]:
    return sorted({release for same in KNOWN[dist]["functions"].get(target, {}).values() for release in same})


#: The first whose adapter reports failed blocks.
PLAYED = [name for name in KNOWN["lmcache"]["releases"] if name in SpecifierSet(">=0.4.2", prereleases=True)]

#: Their probes look at another function than the one corrected, or at more than that one.
BLIND = ["KVF106", "KVF112", "KVF117", "KVF201"]
PROBE = """
from importlib import import_module
from kvfix import fix, target
from kvfix.verdict import _silent
result = []
for found in fix.catalogue():
    for patch in found.patches:
        if found.code < "KVF100" or patch.dist != {dist!r} or not patch.correct:
            continue
        path = target.source_file(patch.dist, patch.module)
        if path is None or target.fingerprint(path, patch.function) is None:
            continue
        module = import_module(patch.module)
        try:
            with _silent(module):
                shows = patch.shows_bug(target.live_function(module, patch.function)[2], module)
        except Exception as error:
            shows = repr(error)
            if {release!r} < patch.broken.lstrip(">="):  # from before the bug, and other than the probe expects
                shows = False
        result.append([found.code, patch.target, shows])
        if shows is True and found.code not in {blind!r}:
            with _silent(module):
                mended = patch.correct(module)(target.live_function(module, patch.function)[2])
                assert not patch.shows_bug(mended, module), (found.code, patch.target, "corrected, and still wrong")
"""


def wrong(dist: str, release: str) -> list[list[Any]]:
    """What the probes must say of the functions that this release has."""
    return [
        [code, patch.target, release in SpecifierSet(patch.broken, prereleases=True)]
        for code, patch in PATCHES
        if patch.dist == dist and release in releases_with(patch.target, dist)
    ]


@pytest.mark.parametrize("name", PLAYED)
def test_the_probe_tells_what_the_fingerprint_tells(name: str, zygote: Zygote, release: Any) -> None:
    assert zygote(PROBE.format(dist="lmcache", release=name, blind=BLIND), release(name)) == wrong("lmcache", name)


HELPED = """
import kvfix
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
kvfix.apply(only=["KVF106"])
result = [hasattr(getattr(LMCacheMPConnector, name), "__wrapped__") for name in ("build_connector_meta", {name!r})]
"""


@pytest.mark.parametrize(("name", "wrong"), [("0.5.5", True), ("0.5.6", False)])
def test_a_helper_is_put_only_where_it_is_asked_for(name: str, wrong: bool, zygote: Zygote, release: Any) -> None:
    """The hook that waits has the same code in both; what is right or wrong is another one of its module."""
    assert zygote(HELPED.format(name="handle_preemptions"), release(name)) == [wrong, wrong]


def test_the_probe_on_the_installed_vllm(zygote: Zygote, release: Any) -> None:
    assert zygote(PROBE.format(dist="vllm", release="", blind=BLIND), release("0.4.6")) == wrong(
        "vllm", KNOWN["vllm"]["releases"][-1]
    )
