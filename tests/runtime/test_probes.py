"""The probes of the fixes, on the real functions of every release that has them."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import kvfix
from kvfix import catalogue, installed_source
from kvfix.applicability import _silent
from kvfix.fixes import stubs
from kvfix.fixes.record import Target
from tests.conftest import ForkServer, release

#: Fixes whose probe needs a running engine, or does not fit some releases without the bug.
UNFIT = ("KVF007", "KVF011", "KVF014", "KVF017", "KVF019", "KVF026", "KVF030", "KVF033", "KVF034")
PATCHES = [
    (found.code, target)
    for found in catalogue.fixes()
    for target in found.targets
    if found.code not in UNFIT and target.probe is not stubs.cannot_tell
]
KNOWN = json.loads(Path(kvfix.__file__).with_name("fingerprints.json").read_text())


def releases_with(target: str, dist: str) -> list[str]:
    return sorted({release for same in KNOWN[dist]["functions"].get(target, {}).values() for release in same})


PLAYED = [name for name in KNOWN["lmcache"]["releases"] if Version(name) >= Version("0.3.10")]

#: Fixes whose probe calls another function than the fixed one, or more than one. KVF330 acts only if it has seen the
#: mark of the other process.
BLIND = [
    "KVF029", "KVF037", "KVF038", "KVF106", "KVF112", "KVF117", "KVF201", "KVF220", "KVF221", "KVF330", "KVF367",
    "KVF373",
]  # fmt: skip


def targets(dist: str, release: str) -> list[tuple[str, Target]]:
    """Return the fixed functions with a probe. The multi-process connectors begin with 0.4.2, the first release whose
    adapter reports failed blocks.
    """
    is_early = dist == "lmcache" and Version(release) < Version("0.4.2")
    return [(code, target) for code, target in PATCHES if target.dist == dist and not (is_early and code >= "KVF100")]


def probed(dist: str, release: str) -> list[list[Any]]:
    """The answers of the probes for the installed functions. None may show the bug once its fix is applied."""
    result: list[list[Any]] = []
    for code, target in targets(dist, release):
        path = installed_source.source_file(target.dist, target.module)
        if path is None or installed_source.fingerprint(path, target.function) is None:
            continue
        module = import_module(target.module)
        found = installed_source.live_function(module, target.function)
        assert found is not None
        with _silent(module):
            try:
                shows: Any = target.probe(found[2], module)
            except Exception as error:  # noqa: BLE001
                # In a release from before the bug the probe does not fit.
                bounds = [Version(each.version) for each in SpecifierSet(target.broken)]
                shows = repr(error) if dist == "lmcache" and Version(release) >= min(bounds) else False
            result.append([code, target.name, shows])
            if shows is True and target.fix and code not in BLIND:
                assert not target.probe(target.fix(module)(found[2]), module), (code, target.name)
    return result


def wrong(dist: str, release: str) -> list[list[Any]]:
    """The right answers of the probes for the functions of this release."""
    return [
        [code, target.name, release in SpecifierSet(target.broken, prereleases=True)]
        for code, target in targets(dist, release)
        if release in releases_with(target.name, dist)
    ]


@pytest.mark.parametrize("name", PLAYED)
def test_the_probe_agrees_with_the_fingerprint(name: str, fork_server: ForkServer) -> None:
    assert fork_server(probed, release(name), "lmcache", name) == wrong("lmcache", name)


def wrapped() -> list[bool]:
    """Return two flags: True if KVF106 wraps its function, and its helper."""
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector as connector

    kvfix.apply(only=["KVF106"])
    return [hasattr(vars(connector)[name], "__wrapped__") for name in ("build_connector_meta", "handle_preemptions")]


@pytest.mark.parametrize(("name", "wrong"), [("0.5.5", True), ("0.5.6", False)])
def test_a_helper_is_applied_only_where_its_fix_is(name: str, wrong: bool, fork_server: ForkServer) -> None:
    """`handle_preemptions` is the same in both releases. The bug is in another function of its module."""
    assert fork_server(wrapped, release(name)) == [wrong, wrong]


def test_the_probe_on_the_installed_vllm(fork_server: ForkServer) -> None:
    version = installed_source.version("vllm").partition("+")[0]
    assert fork_server(probed, release("0.4.6"), "vllm", version) == wrong("vllm", version)
