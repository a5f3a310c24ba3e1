import re
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvfix import catalogue, installed_source
from kvfix.applicability import _silent, fingerprints
from kvfix.fixes.lmcache import kvf018_loaded_chunks_unpinned_twice as kvf018
from kvfix.fixes.lmcache_mp import kvf103_mp_retrieve_false as kvf103
from kvfix.fixes.lmcache_mp import kvf109_mp_freed_while_stored as kvf109
from kvfix.fixes.record import MIXED_ROLL_OUT, Fix, Target
from kvfix_tools import fix_overview
from tests.conftest import ForkServer, release

EVERY = pytest.mark.parametrize("found", catalogue.fixes(), ids=lambda found: found.code)


@EVERY
def test_the_docstring_is_complete(found: Fix) -> None:
    headings = re.findall(r"^## (.+)$|^- (Releases|Upstream|Remove when): ", found.doc, re.MULTILINE)
    assert tuple(heading or fact for heading, fact in headings) == found.sections
    assert (MIXED_ROLL_OUT in found.sections) == found.opt_in
    assert all(found.section(name) for name in found.sections)
    assert found.title.endswith(".")
    assert "http" in found.section("Upstream") or "None known" in found.section("Upstream")
    for dist in found.dists:  # `Releases` must name the newest known release with the bug
        assert max(fix_overview.wrong_releases(found, dist), key=Version, default="") in found.section("Releases")
        assert "\n- Remove when: " in (found.docstring or "") or fix_overview.first_right(found, dist)


@EVERY
def test_a_wrapper_that_fails_changes_nothing(found: Fix, caplog: Any) -> None:
    """If a wrapper fails, the engine gets the hook's answer or error. A fail-closed fix may give its own answer."""
    is_closed = found.on_fault == "closed"
    for target in found.targets:
        if target.fix is None:
            continue
        wrap = target.fix(MagicMock())  # a module that has every attribute
        instance, request = object(), object()  # both lack all attributes that a wrapper reads
        calls: list[Any] = []

        def hook(instance: Any, *args: Any, calls: list[Any] = calls, **kwargs: Any) -> str:
            calls.append((instance, args, kwargs))
            return "the hook's own answer"

        assert wrap(hook)(instance, request, one=1) == "the hook's own answer" or is_closed
        assert calls == [(instance, (request,), {"one": 1})] or (is_closed and not calls)

        def raises(*args: Any, **kwargs: Any) -> None:
            raise LookupError("its own")

        with suppress(LookupError) if is_closed else pytest.raises(LookupError, match="its own"):
            wrap(raises)(instance, request)


#: A probe shows if code has a bug. The probes of these fixes need a running engine, or do not fit some releases.
UNFIT = ("KVF007", "KVF011", "KVF014", "KVF017", "KVF019", "KVF026", "KVF030", "KVF033", "KVF034")
KNOWN = fingerprints()
PLAYED = [name for name in KNOWN["lmcache"]["releases"] if Version(name) >= Version("0.3.10")]
#: Probes of these fixes may show the bug in fixed code. The stubs lack what the fix reads, or the fix is in two parts.
#: KVF330 acts only if the worker has the attribute that `_TOLD` names. The probe's worker lacks this attribute.
BLIND = [
    "KVF029", "KVF037", "KVF038", "KVF106", "KVF112", "KVF117", "KVF201", "KVF220", "KVF221", "KVF330", "KVF367",
    "KVF373",
]  # fmt: skip


def targets(dist: str, release: str) -> list[tuple[str, Target]]:
    """Return targets with a probe. LMCache before 0.4.2 reports no failed blocks, so skip KVF100 and higher codes."""
    is_early = dist == "lmcache" and Version(release) < Version("0.4.2")
    return [
        (found.code, target)
        for found in catalogue.fixes()
        for target in found.targets
        if target.dist == dist and target.probe is not None and found.code not in UNFIT
        if not (is_early and found.code >= "KVF100")
    ]


def probed(dist: str, release: str) -> list[list[Any]]:
    """Return a list of [fix code, target, probe's answer] for installed code. Assert that fixed code shows no bug."""
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
                # The probe may not fit a release that is older than the bug.
                bounds = [Version(each.version) for each in SpecifierSet(target.broken)]
                shows = repr(error) if dist == "lmcache" and Version(release) >= min(bounds) else False
            result.append([code, target.name, shows])
            if shows is True and target.fix and code not in BLIND:
                assert not target.probe(target.fix(module)(found[2]), module), (code, target.name)
    return result


def wrong(dist: str, release: str) -> list[list[Any]]:
    return [
        [code, target.name, release in SpecifierSet(target.broken, prereleases=True)]
        for code, target in targets(dist, release)
        if any(release in same for same in KNOWN[dist]["functions"].get(target.name, {}).values())
    ]


@pytest.mark.parametrize("name", PLAYED)
def test_the_probe_agrees_with_the_fingerprint(name: str, fork_server: ForkServer) -> None:
    assert fork_server(probed, release(name), "lmcache", name) == wrong("lmcache", name)


def test_the_probe_on_the_installed_vllm(fork_server: ForkServer) -> None:
    version = installed_source.version("vllm").partition("+")[0]
    assert fork_server(probed, release("0.4.6"), "vllm", version) == wrong("vllm", version)


class Future:  # LMCache's future, plus a method `cancel` that a later release may add
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def query(self) -> Any:
        return self.answer

    def wait(self, timeout: float | None = None) -> Any:
        return self.answer

    def result(self, timeout: float | None = None, *, strict: bool = False) -> Any:
        return self.answer

    def cancel(self) -> str:
        return "cancelled"


def test_a_failed_load_answers_even_if_it_cannot_be_recorded(faults: dict[str, int]) -> None:
    """KVF103 records failed blocks in a list of the worker. In this test, the worker has no list."""
    load = kvf103.load(SimpleNamespace(), Future(False), [3])
    assert load.result(timeout=1, strict=True) is False
    assert load.cancel() == "cancelled"
    assert list(faults) == [f"a fault of kvfix itself in {kvf103.__name__}.load: AttributeError"]


def test_thousands_of_stores_as_one() -> None:
    """A long prompt in small steps has thousands of stores. Nested calls, one per store, would raise RecursionError."""
    stores = [Future(False) for _ in range(5000)]
    both: Any = stores[0]
    for store in stores[1:]:
        both = kvf109.both(both, store)
    assert both.query() is False
    for store in stores[:-1]:
        store.answer = True
    assert both.query() is False
    assert (both.wait(1), both.result(strict=True), both.cancel()) == (False, False, "cancelled")
    stores[-1].answer = True
    assert both.query() is True


def test_a_layerwise_load_ends_even_if_a_pin_cannot_be_released(faults: dict[str, int]) -> None:
    assert list(kvf018._layers(iter([1, 2]), kvf018._Load([SimpleNamespace(pin=list, unpin=None)]))) == [1, 2]
    assert len(faults) == 1
