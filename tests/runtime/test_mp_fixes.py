"""The fixes of the multi-process connectors and of vLLM, on the real functions of every release that has them."""

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

import kvfix
from kvfix import catalogue
from tests.conftest import ForkServer

PATCHES = [
    (found.code, target)
    for found in catalogue.fixes()
    for target in found.targets
    if found.code >= "KVF100" and target.fix
]
KNOWN = json.loads(Path(kvfix.__file__).with_name("fingerprints.json").read_text())


def releases_with(target: str, dist: str) -> list[str]:
    return sorted({release for same in KNOWN[dist]["functions"].get(target, {}).values() for release in same})


#: Releases from the first on whose adapter reports failed blocks.
PLAYED = [name for name in KNOWN["lmcache"]["releases"] if name in SpecifierSet(">=0.4.2", prereleases=True)]

#: Fixes whose probe calls another function than the fixed one, or more than one.
BLIND = ["KVF106", "KVF112", "KVF117", "KVF201"]
PROBE = """
from importlib import import_module
from kvfix import installed_source
from kvfix import catalogue
from kvfix.applicability import _silent
result = []
for found in catalogue.fixes():
    for target in found.targets:
        if found.code < "KVF100" or target.dist != {dist!r} or not target.fix:
            continue
        path = installed_source.source_file(target.dist, target.module)
        if path is None or installed_source.fingerprint(path, target.function) is None:
            continue
        module = import_module(target.module)
        try:
            with _silent(module):
                shows = target.probe(installed_source.live_function(module, target.function)[2], module)
        except Exception as error:
            shows = repr(error)
            if {release!r} < target.broken.lstrip(">="):  # from before the bug: the probe does not fit
                shows = False
        result.append([found.code, target.name, shows])
        if shows is True and found.code not in {blind!r}:
            with _silent(module):
                fixed = target.fix(module)(installed_source.live_function(module, target.function)[2])
                assert not target.probe(fixed, module), (found.code, target.name, "fixed, and still wrong")
"""


def wrong(dist: str, release: str) -> list[list[Any]]:
    """The right answers of the probes for the functions of this release."""
    return [
        [code, target.name, release in SpecifierSet(target.broken, prereleases=True)]
        for code, target in PATCHES
        if target.dist == dist and release in releases_with(target.name, dist)
    ]


@pytest.mark.parametrize("name", PLAYED)
def test_the_probe_agrees_with_the_fingerprint(name: str, fork_server: ForkServer, release: Any) -> None:
    assert fork_server(PROBE.format(dist="lmcache", release=name, blind=BLIND), release(name)) == wrong("lmcache", name)


HELPED = """
import kvfix
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
kvfix.apply(only=["KVF106"])
result = [hasattr(getattr(LMCacheMPConnector, name), "__wrapped__") for name in ("build_connector_meta", {name!r})]
"""


@pytest.mark.parametrize(("name", "wrong"), [("0.5.5", True), ("0.5.6", False)])
def test_a_helper_is_applied_only_where_its_fix_is(
    name: str, wrong: bool, fork_server: ForkServer, release: Any
) -> None:
    """`handle_preemptions` is the same in both releases. The bug is in another function of its module."""
    assert fork_server(HELPED.format(name="handle_preemptions"), release(name)) == [wrong, wrong]


def test_the_probe_on_the_installed_vllm(fork_server: ForkServer, release: Any) -> None:
    assert fork_server(PROBE.format(dist="vllm", release="", blind=BLIND), release("0.4.6")) == wrong(
        "vllm", KNOWN["vllm"]["releases"][-1]
    )
