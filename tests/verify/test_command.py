import json
import re
import sys
from typing import Any

import pytest

from kvfix_tools.verify import command
from kvfix_tools.verify.command import Options
from tests.conftest import Fresh
from tests.verify.fake import CHUNK, URL, Engine, served

KEY = "secret-of-the-test"


def run(capsys: pytest.CaptureFixture[str], engine: Engine, **options: Any) -> tuple[int, str]:
    with served(engine):
        code = command.verify(Options(URL, seed=1, prompt_tokens=300, **options))
    return code, capsys.readouterr().out


NOISY = {"noise": 0.01}
EVERY_HIT: dict[str, Any] = {"wrong": lambda prompt, hit, together: True}
TWO = (("base", None), ("adapter", "base"))
NO_RESET = {"blocks": 300, "missing": ("/reset_prefix_cache",)}
NO_TOKENIZER = {"missing": ("/tokenize",)}
OTHERS = {"others": True}
#: For each case, the settings of the server, the options of the command, the exit code, and parts of the output.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, tuple[str, ...]]] = {
    "exact": ({}, {}, 0, ("verify same: 48 prompts", f"chunks of {CHUNK}", "equal in every bit")),
    "noisy": (NOISY, {}, 0, ("verify same: 48 prompts", "differ by at most")),
    "every hit is wrong": ({**NOISY, **EVERY_HIT}, {}, 1,
        ("SUMMARY: kvfix verify different: wrong for all hits, alone and under load", "kvfix explain KVF020")),
    # After the first NaN, some computed answers and the noise are NaN too. `Rounds._survey` counts NaN first.
    "NaN that spoils the noise": ({"spreads_nan": True}, {}, 1,
        ("different: the model computes NaN with KV from the connector", "restart the engine, and empty the cache")),
    # Three wrong answers of 48 are no proof. New prompts of the same kind prove the difference.
    "one border": ({**NOISY, "wrong": lambda prompt, hit, together: len(prompt) == CHUNK}, {}, 1,
        ("wrong for 'one chunk', alone and under load",)),
    "one number of chunks": ({**NOISY, "wrong": lambda prompt, hit, together: 0 < hit <= CHUNK}, {}, 1,
        ("different: wrong where exactly 1 chunks come from the connector",)),
    "only under load": ({**NOISY, "wrong": lambda prompt, hit, together: together > 1}, {}, 1, ("only under load",)),
    "adapters": ({"models": TWO}, {}, 0, ()),
    "adapters share KV": ({"models": TWO, "adapters_share": True}, {}, 1,
        ("adapter got KV of a prompt that kvfix sent only to the tested model",)),
    "an adapter has its base model's context length": ({"models": TWO, "length": 250}, {"model": "adapter"}, 0, ()),
    "fillers empty the cache": (NO_RESET, {}, 0, ("other prompts each time, which use all GPU blocks",)),
    "fillers, and every hit is wrong": ({**NO_RESET, **EVERY_HIT}, {}, 1, ()),
    "texts if nothing tokenizes": (NO_TOKENIZER, {}, 0, ()),
    "texts, and every hit is wrong": ({**NO_TOKENIZER, **EVERY_HIT}, {}, 1, ()),
    "requests are not counted": ({"has_counts": False}, {}, 77, ("/metrics does not count the requests",)),
    "no connector": ({"connector": False}, {}, 77,
        ("vLLM never asked a connector. Start vLLM with --kv-transfer-config",)),
    "a context of less than two chunks": ({"length": 150}, {}, 77,
        ("two chunks of 64 tokens do not fit into the model's context of 150 tokens",)),
    "a tokenizer that does not know the words": ({"vocabulary": 2}, {}, 2, ("makes only 2 different tokens",)),
    "nothing is stored": ({"stores": False}, {}, 77, ("no token came from the connector", "PYTHONHASHSEED")),
    "the cache is too small": ({"keeps": 8}, {}, 77,
        ("expected tokens came from the connector", "is too small for all prompts")),
    "other clients hide the hits": (OTHERS, {}, 77,
        ("SUMMARY: kvfix verify nothing proven: requests of other clients hide",)),
    "other clients, and every hit is wrong": ({**OTHERS, **EVERY_HIT}, {}, 1, ()),
    "no prefix cache": ({"prefix_caching": False}, {}, 77, ("Start vLLM with --enable-prefix-caching",)),
    "metrics are hidden": ({"missing": ("/metrics",)}, {}, 77, ("Use the port of the engine, not of a proxy",)),
    "noise hides everything": ({"noise": 1.0}, {}, 77, ("the noise is too large",)),
    "a key is needed": ({"key": KEY}, {}, 2, ("needs an API key. Give --api-key-env",)),
    "it ends in the middle": ({"ends_after": 50}, {}, 2, ("closed the connection during an answer",)),
    "another model": ({}, {"model": "large"}, 2, ("has no model 'large'. Give --model with one of: tiny",)),
    "out of time": ({}, {"seconds": 0.01}, 77, ("Use a longer --seconds",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_server_has_its_verdict(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    behaviour, options, code, texts = CASES[name]
    found, text = run(capsys, Engine(**behaviour), **options)
    assert found == code, text
    assert all(part in text for part in texts), text
    assert name != "one border" or re.search(r"Fresh prompts of 'one chunk', alone: (\d) of \1 differ", text), text


def test_one_large_difference_that_nothing_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    once = iter([True])
    engine = Engine(noise=0.01, wrong=lambda prompt, hit, together: len(prompt) == CHUNK + 1 and next(once, False))
    code, text = run(capsys, engine)
    assert code == 77, text
    assert "new prompts of the same kind did not show this difference. Run again with --requests" in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, Engine(noise=0.01, **EVERY_HIT), json=True)
    answer = json.loads(text)
    assert code == answer["exit"] == 1
    assert answer["verdict"] == "different"
    assert answer["kinds"]["many chunks"]["above_limit"] == {"alone": 15, "under load": 15}
    assert answer["false_alarm_rate"] <= 1e-4


def test_a_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run(capsys, Engine(key=KEY), api_key_env="KEY_OF_THE_TEST")
    assert (code, "KEY_OF_THE_TEST is not set" in text) == (2, True)
    monkeypatch.setenv("KEY_OF_THE_TEST", KEY)
    code, text = run(capsys, Engine(key=KEY), api_key_env="KEY_OF_THE_TEST")
    assert code == 0, text
    assert KEY not in text


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.verify(Options("http://127.0.0.1:1")) == 2
    assert "http://127.0.0.1:1 does not answer: " in capsys.readouterr().out


def test_dry_run_asks_nothing_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine()
    with served(engine):
        assert command.verify(Options(URL, dry_run=True)) == 0
    assert "48 prompts of up to 1200 tokens" in capsys.readouterr().out
    assert set(engine.paths) == {"/v1/models", "/version", "/metrics", "/tokenize"}


def test_without_its_libraries(fresh: Fresh) -> None:
    code = "import sys; sys.modules['httpx'] = None; from kvfix_tools.cli import main; main()"
    done = fresh.run([sys.executable, "-c", code, "verify", "http://127.0.0.1:1"])
    assert done.returncode == 77
    assert "pip install httpx prometheus_client" in done.stderr
