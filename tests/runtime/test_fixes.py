"""Rules that every fix keeps, and KVF001 on the real function of its release."""

import re
from contextlib import suppress
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

import pytest
from packaging.version import Version

import kvfix
from kvfix import catalogue
from kvfix.fixes import stubs
from kvfix.fixes.record import MIXED_ROLL_OUT, Fix
from kvfix_tools import fix_overview
from tests.conftest import ADAPTER, ForkServer, release

EVERY = pytest.mark.parametrize("found", catalogue.fixes(), ids=lambda found: found.code)


@EVERY
def test_the_docstring_is_complete(found: Fix) -> None:
    headings = re.findall(r"^## (.+)$|^- (Releases|Upstream|Remove when): ", found.doc, re.MULTILINE)
    assert tuple(heading or fact for heading, fact in headings) == found.sections
    assert (MIXED_ROLL_OUT in found.sections) == found.opt_in
    assert all(found.section(name) for name in found.sections)
    assert found.title.endswith(".")
    assert "http" in found.section("Upstream") or "None known" in found.section("Upstream")
    for dist in found.dists:  # the text agrees with the fingerprints
        wrong = max(fix_overview.wrong_releases(found, dist), key=Version, default="")
        assert wrong in found.section("Releases")
        assert "\n- Remove when: " in (found.docstring or "") or fix_overview.first_right(found, dist)


class Nothing:
    """An instance that has none of the attributes that a wrapper reads."""

    __slots__ = ()


@EVERY
def test_a_wrapper_that_fails_changes_nothing(found: Fix, caplog: Any) -> None:
    """The engine is sacred: the hook's own answer, its own exception, the arguments as they were passed.

    A fix of wrong KV may give a closed answer instead, and leave the hook out.
    """
    is_closed = found.on_fault == "closed"
    for target in found.targets:
        if target.fix is None:
            continue
        wrap = target.fix(MagicMock())  # a module with any attribute
        request = object()
        calls: list[Any] = []

        def hook(instance: Any, *args: Any, calls: list[Any] = calls, **kwargs: Any) -> str:
            calls.append((instance, args, kwargs))
            return "the hook's own answer"

        wrapped = wrap(hook)
        instance = Nothing()
        assert wrapped(instance, request, one=1) == "the hook's own answer" or is_closed
        assert calls == [(instance, (request,), {"one": 1})] or (is_closed and not calls)

        def raises(*args: Any, **kwargs: Any) -> None:
            raise LookupError("its own")

        with suppress(LookupError) if is_closed else pytest.raises(LookupError, match="its own"):
            wrap(raises)(instance, request)


def promises(cases: list[tuple[int, ...]], skip: list[str] | None = None) -> list[Any]:
    """The real hook of 0.3.10, first with an empty lookup cache, then twice from the cache with other computed tokens.

    The lookup client is a stub that keeps a hit, like the real one. cases: hit, computed tokens at first, then, total.
    """
    if skip:
        kvfix.apply(skip=skip)
    adapter = import_module(ADAPTER)
    adapter.logger.disabled = True
    adapter.extract_request_configs = lambda params: None

    class Client:
        supports_producer_reuse = True

        def __init__(self, hit: int) -> None:
            self.hit = hit
            self.kept: dict[str, int] = {}

        def lookup_cache(self, lookup_id: str) -> int | None:
            return self.kept.get(lookup_id)

        def clear_lookup_status(self, lookup_id: str) -> None:
            self.kept.pop(lookup_id, None)

        def lookup(self, tokens: Any, lookup_id: str, request_configs: Any) -> int:
            return self.kept.setdefault(lookup_id, self.hit)

    result = []
    for hit, first, then, total in cases:
        impl = adapter.LMCacheConnectorV1Impl.__new__(adapter.LMCacheConnectorV1Impl)
        impl.kv_role, impl.lookup_client, impl.skip_last_n_tokens = "kv_both", Client(hit), 0
        impl.load_specs, impl._requests_priority, impl._unfinished_requests = {}, {}, {}
        request = stubs.request(total)
        answers = [impl.get_num_new_matched_tokens(request, first)]
        answers += [impl.get_num_new_matched_tokens(request=request, num_computed_tokens=then) for _ in range(2)]
        spec = impl.load_specs[stubs.NAME]
        try:
            impl.update_state_after_alloc(request, answers[-1])
            died = ""
        except AssertionError as error:
            died = str(error)
        result.append([answers, spec.vllm_cached_tokens, spec.lmcache_cached_tokens, spec.can_load, died])
    return result


#: (hit, computed tokens at first, then, tokens of the request), the answers as released, and with KVF001: the answers,
#: computed and hit tokens of the load, and whether there is one.
PROMISES = [
    ((256, 336, 336, 10009), [0, 256, 256], [[0, 0, 0], 336, 256, False]),  # the report
    ((256, 0, 240, 10009), [256, 256, 256], [[256, 16, 16], 240, 256, True]),
    ((256, 256, 256, 10009), [0, 256, 256], [[0, 0, 0], 256, 256, False]),
    # a full hit leaves the last token to compute
    ((200, 0, 0, 200), [199, 200, 200], [[199, 199, 199], 0, 200, True]),
    ((200, 199, 199, 200), [0, 200, 200], [[0, 0, 0], 199, 200, False]),
    ((200, 96, 96, 200), [103, 200, 200], [[103, 103, 103], 96, 200, True]),
    # as released 1024 is promised, more than the 300 that remain
    ((1024, 0, 800, 1100), [1024, 1024, 1024], [[1024, 224, 224], 800, 1024, True]),
]
CASES = [case for case, *_ in PROMISES]


def test_kvf001(fork_server: ForkServer) -> None:
    released = fork_server(promises, release("0.3.10"), CASES)
    assert [answers for answers, *_ in released] == [answers for _, answers, _ in PROMISES]
    assert released[0][4] == (
        "Mismatch in tokens to load: 256 vs 256 (tokens in lmcache) - 336 (tokens in vllm) - 0 "
        "(full lmcache hits subtracts last token to recalculate logits) for request kvfix-probe"
    )
    assert fork_server(promises, release("0.3.10"), CASES, fixes=True) == [[*fixed, ""] for *_, fixed in PROMISES]
    off = fork_server(promises, release("0.3.10"), CASES[:1], ["KVF001"])
    assert off[0][0] == [0, 256, 256]
