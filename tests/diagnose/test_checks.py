"""For an unknown failure, kvfix-diagnose names the releases that have the failing code (checks.json)."""

import pytest

from kvfix_tools.diagnose import statements
from maintain import statements as released
from tests.conftest import RELEASES
from tests.diagnose.lines import CORE, NEWEST, STARTS, diagnose, raised, site_packages

PACKAGES = {"lmcache": (NEWEST, RELEASES / NEWEST / "lmcache"), "vllm": ("0.32.0", site_packages() / "vllm")}
#: RAISED is an exception with a text. ASSERTED is an assertion without a text. No known problem names either failure.
RAISED = "lmcache/v1/kv_layer_groups.py", "parse_kvcache_shape_spec", "KV shape specification cannot be empty"
ASSERTED = "vllm/v1/core/kv_cache_utils.py", "__init__", "target_block_size % hash_block_size == 0"


def failed(text: str = RAISED[2], function: str = RAISED[1], file: str = RAISED[0]) -> str:
    return raised([(file, function, f'raise ValueError("{text}")')], f"ValueError: {text}")


def asserted(source: str = ASSERTED[2], function: str = ASSERTED[1]) -> str:
    return raised([(ASSERTED[0], function, f"assert {source}")], "AssertionError")


def sentence(log: str) -> str:
    (found,) = diagnose(log).findings
    return found.sentence


@pytest.mark.parametrize("dist", PACKAGES)
def test_the_file_has_what_the_release_has(dist: str) -> None:
    """If checks.json is out of date, run `make statements`."""
    release, package = PACKAGES[dist]
    releases, table = statements.checks()[dist]
    taken: statements.Table = {}
    released.take_checks(taken, release, package)
    assert release in releases
    assert {place for place, having in table.items() if release in having} == set(taken)


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (failed(), ", raised by LMCache, because this was true: `not spec_str`; LMCache has this code from 0.3.11 to "
         f"{NEWEST}, the newest known release, so an upgrade does not help"),
        # The text does not promise that 0.5.6 removes the cause.
        (failed("Lazy offload is enabled but no GPU block pool is bound", "_process_lazy_offload_store_requests",
                "lmcache/integration/vllm/lmcache_mp_connector.py"),
         "LMCache has this code from 0.5.4 to 0.5.5, but not in 0.5.6, which may still have the cause"),
        # kvfix-diagnose finds assertions without text by their source, and exceptions without frames by their text.
        (asserted(), "; vLLM has this code from 0.12.0 to "),
        (f"{CORE}ValueError: {RAISED[2]}\n", "because this was true: `not spec_str`"),
    ],
)  # fmt: skip
def test_it_names_the_releases_and_the_condition(log: str, says: str) -> None:
    assert says in sentence(log)


@pytest.mark.parametrize(
    "log",
    [
        failed(function="another"), failed("another text"), failed(file="lmcache/v1/another.py"), failed(file="x.py"),
        asserted(function="another"), asserted("target_block_size == 0"),
        STARTS.format("0.11.0") + asserted(),  # vLLM 0.11.0 lacks this check, so the user has changed the code
    ],
)  # fmt: skip
def test_near_misses(log: str) -> None:
    assert "has this code" not in sentence(log)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("if a:\n    raise E('x {}'.format(1))", []),
        ("if a:\n    if b:\n        raise m.E(f'x {c}')\n    else:\n        raise E('y')",
         [("E", "x {}", "b"), ("E", "y", "")]),
        ("assert a, 'x'\nassert b", [("assert", "x", "a"), ("assert", "", "b")]),
        ("if a:\n    def f():\n        logger.error('x %s', 1)\nlogger.info('y')", [("", "x %s", "")]),
    ],
)  # fmt: skip
def test_what_is_taken_of_a_file(code: str, expected: list[tuple[str, str, str]]) -> None:
    assert [tuple(check) for _, check in released.checks_in(code.encode())] == expected
