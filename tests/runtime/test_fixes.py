"""What every fix must keep, and what each does to the real function of the release that it is for."""

from typing import Any
from unittest.mock import MagicMock

import pytest

from kvfix import fix
from kvfix.fix import SECTIONS, SECTIONS_UNMENDED
from kvfix.fixes import kvf001_lookup_cache_ignores_computed as kvf001
from tests.conftest import ADAPTER, Zygote

EVERY = pytest.mark.parametrize("found", fix.catalogue(), ids=lambda found: found.code)


def test_codes_are_unique_and_found_by_code_and_slug() -> None:
    codes = [found.code for found in fix.catalogue()]
    assert len(set(codes)) == len(codes) > 0
    for found in fix.catalogue():
        assert fix.find(found.code.lower()) is found
        assert fix.find(found.slug) is found


@EVERY
def test_the_story_is_complete(found: fix.Fix) -> None:
    headings = [line[3:] for line in (found.doc or "").splitlines() if line.startswith("## ")]
    assert tuple(headings) == (SECTIONS if found.mends else SECTIONS_UNMENDED)
    assert all(found.section(name) for name in found.sections)
    assert found.title.endswith(".")
    assert "http" in found.section("Upstream") or "None known" in found.section("Upstream")


class Nothing:
    """An instance that has none of the attributes a correction may ask for."""

    __slots__ = ()


@EVERY
def test_a_correction_that_fails_leaves_the_hook_alone(found: fix.Fix, caplog: Any) -> None:
    """The engine is sacred: the hook's own answer, its own exception, the arguments as they were passed."""
    for patch in found.patches:
        if patch.correct is None:
            continue
        correct = patch.correct(MagicMock())  # a module that has whatever is asked of it
        request = object()
        seen: list[Any] = []

        def hook(instance: Any, *args: Any, seen: list[Any] = seen, **kwargs: Any) -> str:
            seen.append((instance, args, kwargs))
            return "the hook's own answer"

        corrected = correct(hook)
        instance = Nothing()
        assert corrected(instance, request, one=1) == "the hook's own answer"
        assert seen == [(instance, (request,), {"one": 1})]

        def dies(*args: Any, **kwargs: Any) -> None:
            raise LookupError("its own")

        with pytest.raises(LookupError, match="its own"):
            correct(dies)(instance, request)


class TestKVF001:
    """(hit, computed, tokens of the request, promised): the rule of the report, in all its faces."""

    RULE = [
        (256, 0, 10009, 256),
        (256, 240, 10009, 16),
        (256, 256, 10009, 0),
        (256, 336, 10009, 0),  # the report
        (200, 0, 200, 199),  # a full hit leaves the last token to compute
        (200, 199, 200, 0),
        (200, 96, 200, 103),
        (1024, 800, 1100, 224),  # raw, 1024 would be more than the 300 that remain
    ]

    @pytest.mark.parametrize(("hit", "computed", "total", "promised"), RULE)
    def test_balance(self, hit: int, computed: int, total: int, promised: int) -> None:
        assert kvf001.balance(hit, computed, total) == promised
        assert 0 <= promised <= max(0, total - 1 - computed)

    #: The real hook of 0.3.10, asked first with nothing in the lookup cache, then three times from the cache, each
    #: time with other computed tokens: the lookup client is a stand-in with the real one's rule (a hit is kept).
    CASE = f"""
import kvfix
kvfix.apply({{only}})
import {ADAPTER} as adapter
adapter.logger.disabled = True
class Client:
    supports_producer_reuse = True
    def __init__(self): self.kept = {{{{}}}}
    def lookup_cache(self, lookup_id): return self.kept.get(lookup_id)
    def clear_lookup_status(self, lookup_id): self.kept.pop(lookup_id, None)
    def lookup(self, tokens, lookup_id, request_configs): return self.kept.setdefault(lookup_id, hit)
class Request:
    request_id, priority, sampling_params, mm_features, mm_hashes = "r", 0, None, [], []
    def __init__(self, total): self.num_tokens = total; self.all_token_ids = self.prompt_token_ids = [0] * total
adapter.extract_request_configs = lambda params: None
result = []
for hit, first, then, total in {{cases}}:
    impl = adapter.LMCacheConnectorV1Impl.__new__(adapter.LMCacheConnectorV1Impl)
    impl.kv_role, impl.lookup_client, impl.skip_last_n_tokens = "kv_both", Client(), 0
    impl.load_specs, impl._requests_priority, impl._unfinished_requests = {{{{}}}}, {{{{}}}}, {{{{}}}}
    request = Request(total)
    answers = [impl.get_num_new_matched_tokens(request, first)]
    answers += [impl.get_num_new_matched_tokens(request=request, num_computed_tokens=then) for _ in range(2)]
    spec = impl.load_specs["r"]
    try:
        impl.update_state_after_alloc(request, answers[-1])
        died = ""
    except AssertionError as error:
        died = str(error)
    result.append([answers, spec.vllm_cached_tokens, spec.lmcache_cached_tokens, spec.can_load, died])
"""

    CASES = [(256, 336, 336, 10009), (256, 0, 240, 10009), (200, 0, 0, 200), (200, 96, 96, 200), (1024, 0, 800, 1100)]

    def test_as_released(self, zygote: Zygote, release: Any) -> None:
        found = zygote(self.CASE.format(only="only=[]", cases=self.CASES), release("0.3.10"))
        assert [answers for answers, *_ in found] == [
            [0, 256, 256],
            [256, 256, 256],
            [199, 200, 200],
            [103, 200, 200],
            [1024, 1024, 1024],
        ]
        assert found[0][4] == (
            "Mismatch in tokens to load: 256 vs 256 (tokens in lmcache) - 336 (tokens in vllm) - 0 "
            "(full lmcache hits subtracts last token to recalculate logits) for request r"
        )

    def test_fixed(self, zygote: Zygote, release: Any) -> None:
        found = zygote(self.CASE.format(only="", cases=self.CASES), release("0.3.10"))
        assert found == [
            [[0, 0, 0], 336, 256, False, ""],
            [[256, 16, 16], 240, 256, True, ""],
            [[199, 199, 199], 0, 200, True, ""],
            [[103, 103, 103], 96, 200, True, ""],
            [[1024, 224, 224], 800, 1024, True, ""],
        ]

    def test_switched_off_alone(self, zygote: Zygote, release: Any) -> None:
        found = zygote(self.CASE.format(only='skip=["KVF001"]', cases=self.CASES[:1]), release("0.3.10"))
        assert found[0][0] == [0, 256, 256]


class TestKVF022:
    """The probe on each code that `update` has had, as released and corrected."""

    CASE = f"""
import {ADAPTER} as adapter
from kvfix.fixes.kvf022_resume_shares_block_list import correct, shows_bug
update = adapter.RequestTracker.update
result = [shows_bug(update, adapter), shows_bug(correct(adapter)(update), adapter)]
"""

    @pytest.mark.parametrize("name", ["0.3.10", "0.3.10.post1", "0.3.11", "0.4.1", "0.5.6"])
    def test_probe(self, name: str, zygote: Zygote, release: Any) -> None:
        assert zygote(self.CASE, release(name)) == [True, False]
