"""`kvfix verify` against stand-ins for the server: each verdict, and each server that proves nothing."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from kvfix_tools.verify import command
from kvfix_tools.verify.command import Options
from tests.conftest import Fresh
from tests.verify.fake import BLOCK, CHUNK, Behaviour, served

SECRET = "secret-of-the-test"


def run(capsys: pytest.CaptureFixture[str], behaviour: Behaviour, **options: Any) -> tuple[int, str]:
    with served(behaviour) as (url, _):
        code = command.verify(Options(url, seed=1, prompt_tokens=300, **options))
    return code, capsys.readouterr().out


def every_hit(prompt: list[int], hit: int, together: int) -> bool:
    return True


def one_border(prompt: list[int], hit: int, together: int) -> bool:
    return len(prompt) == CHUNK


def one_chunk(prompt: list[int], hit: int, together: int) -> bool:
    return BLOCK <= hit <= CHUNK


def under_load(prompt: list[int], hit: int, together: int) -> bool:
    return together > 1


def once(asked: list[int]) -> Behaviour:
    """One large difference that nothing repeats."""

    def wrong(prompt: list[int], hit: int, together: int) -> bool:
        asked.extend([1] * (len(prompt) == CHUNK + 1))
        return len(prompt) == CHUNK + 1 and len(asked) == 1

    return Behaviour(noise=0.01, wrong=wrong)


TWO = (("base", None), ("adapter", "base"))
NO_RESET, NO_TOKENS, NO_METRICS = (("/reset_prefix_cache",), ("/tokenize",), ("/metrics",))
#: {name: (behaviour of the server, options, exit code, parts of the output)}
CASES: dict[str, tuple[Behaviour, dict[str, Any], int, tuple[str, ...]]] = {
    "same, exact": (Behaviour(), {}, 0,
        ("SUMMARY: kvfix verify same: 48 prompts", f"chunks of {CHUNK}", "equal in every bit")),
    "same, with noise": (Behaviour(noise=0.01), {}, 0, ("SUMMARY: kvfix verify same: 48 prompts", "differ by at most")),
    "every hit": (Behaviour(noise=0.01, wrong=every_hit), {}, 1,
        ("SUMMARY: kvfix verify different: wrong for all hits, alone and under load", "kvfix explain KVF020")),
    # The survey finds NaN: from then on computed answers are NaN too, and so is the noise.
    "NaN that spoils the noise": (Behaviour(spreads_nan=True), {}, 1,
        ("SUMMARY: kvfix verify different: the model computes NaN with KV from the connector",
         "restart the engine, and empty the cache")),
    # Found by fresh prompts of the kind: three of 48 answers alone are no proof.
    "one border": (Behaviour(noise=0.01, wrong=one_border), {}, 1,
        ("wrong for 'one chunk', alone and under load", "Fresh prompts of 'one chunk', alone: 7 of 7 differ")),
    "one number of chunks": (Behaviour(noise=0.01, wrong=one_chunk), {}, 1,
        ("SUMMARY: kvfix verify different: wrong where exactly 1 chunks come from the connector",)),
    "only under load": (Behaviour(noise=0.01, wrong=under_load), {}, 1, ("only under load",)),
    "once": (once([]), {}, 77, ("fresh prompts did not repeat this. Run again with --requests",)),
    "adapters": (Behaviour(models=TWO), {}, 0, ()),
    "adapters share KV": (Behaviour(models=TWO, adapters_share=True), {}, 1,
        ("adapter got KV of a prompt that was never sent to it",)),
    "an adapter has the context length of its base model": (
        Behaviour(models=TWO, length=250), {"model": "adapter"}, 0, ()),
    "fillers empty the cache": (Behaviour(blocks=300, missing=NO_RESET), {}, 0,
        ("other prompts each time, which use all GPU blocks",)),
    "fillers, every hit": (Behaviour(blocks=300, missing=NO_RESET, wrong=every_hit), {}, 1, ()),
    "no tokenizer": (Behaviour(missing=NO_TOKENS), {}, 2, ("/tokenize answers 404",)),
    "a tokenizer that does not know the words": (Behaviour(vocabulary=2), {}, 2, ("makes only 2 different tokens",)),
    "nothing is counted": (Behaviour(counts=False), {}, 77, ("/metrics does not count the requests",)),
    "no connector": (Behaviour(connector=False), {}, 77,
        ("vLLM never asked a connector. Start vLLM with --kv-transfer-config",)),
    "a context of less than two chunks": (Behaviour(length=150), {}, 77,
        ("two chunks of 64 tokens do not fit into the model's context of 150 tokens",)),
    "nothing is stored": (Behaviour(stores=False), {}, 77, ("no token came from the connector", "PYTHONHASHSEED")),
    "the cache is too small": (Behaviour(keeps=8), {}, 77,
        ("expected tokens came from the connector", "Give the connector more memory")),
    "other clients": (Behaviour(others=True), {}, 77,
        ("SUMMARY: kvfix verify nothing proven: requests of other clients hide",)),
    "other clients, every hit": (Behaviour(others=True, wrong=every_hit), {}, 1, ()),
    "no prefix cache": (Behaviour(prefix_caching=False), {}, 77, ("Start vLLM with --enable-prefix-caching",)),
    "metrics are hidden": (Behaviour(missing=NO_METRICS), {}, 77, ("Use the port of the engine, not of a proxy",)),
    "noise hides everything": (Behaviour(noise=1.0), {}, 77, ("the noise is too large",)),
    "no key": (Behaviour(key=SECRET), {}, 2, ("needs an API key. Give --api-key-env",)),
    "a key that is not set": (Behaviour(key=SECRET), {"api_key_env": "OTHER_KEY_OF_THE_TEST"}, 2,
        ("OTHER_KEY_OF_THE_TEST is not set",)),
    "a key": (Behaviour(key=SECRET), {"api_key_env": "KEY_OF_THE_TEST"}, 0, ()),
    "it ends in the middle": (Behaviour(ends_after=50), {}, 2, ("closed the connection during an answer",)),
    "another model": (Behaviour(), {"model": "large"}, 2, ("has no model 'large'. Give --model with one of: tiny",)),
    "out of time": (Behaviour(), {"seconds": 0.2}, 77, ("Use a longer --seconds",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_server(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_THE_TEST", SECRET)
    behaviour, options, wanted, parts = CASES[name]
    code, text = run(capsys, behaviour, **options)
    assert code == wanted, text
    assert [part for part in parts if part not in text] == [], text
    assert SECRET not in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, Behaviour(noise=0.01, wrong=every_hit), json=True)
    answer = json.loads(text)
    assert code == answer["exit"] == 1
    assert answer["verdict"] == "different"
    assert answer["kinds"]["many chunks"]["above_limit"] == {"alone": 15, "under load": 15}
    assert answer["false_alarm_rate"] <= 1e-4


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.verify(Options("http://127.0.0.1:1")) == 2
    assert "http://127.0.0.1:1 does not answer: " in capsys.readouterr().out


def test_dry_run_asks_nothing_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    with served(Behaviour()) as (url, engine):
        assert command.verify(Options(url, dry_run=True)) == 0
    assert "48 prompts of up to 1200 tokens" in capsys.readouterr().out
    assert set(engine.paths) == {"/v1/models", "/version", "/metrics", "/tokenize"}


def test_without_its_libraries(fresh: Fresh) -> None:
    code = "import sys; sys.modules['httpx'] = None; from kvfix_tools.cli import main; main()"
    done = fresh.run([sys.executable, "-c", code, "verify", "http://127.0.0.1:1"])
    assert done.returncode == 77
    assert "pip install httpx prometheus_client" in done.stderr
