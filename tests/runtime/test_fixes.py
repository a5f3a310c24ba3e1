"""Rules that every fix keeps."""

from contextlib import suppress
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvfix import catalogue
from kvfix.fixes.api import MIXED_ROLL_OUT, Fix

EVERY = pytest.mark.parametrize("found", catalogue.fixes(), ids=lambda found: found.code)


@EVERY
def test_the_docstring_is_complete(found: Fix) -> None:
    headings = [line[3:] for line in (found.doc or "").splitlines() if line.startswith("## ")]
    assert tuple(headings) == found.sections
    assert (MIXED_ROLL_OUT in headings) == found.opt_in
    assert all(found.section(name) for name in found.sections)
    assert found.title.endswith(".")
    assert "http" in found.section("Upstream") or "None known" in found.section("Upstream")


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
