"""`kvfix verify` against stand-ins for the server: each verdict, and each server that proves nothing."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from kvfix_tools.verify import command
from kvfix_tools.verify.command import Options
from tests.conftest import Fresh
from tests.verify.fake import CHUNK, Behaviour, served


def run(capsys: pytest.CaptureFixture[str], behaviour: Behaviour, **options: Any) -> tuple[int, str]:
    with served(behaviour) as (url, _):
        code = command.verify(Options(url, seed=1, prompt_tokens=300, **options))
    return code, capsys.readouterr().out


def every_hit(prompt: list[int], hit: int, together: int) -> bool:
    return True


class TestVerdicts:
    @pytest.mark.parametrize("noise", [0.0, 0.01])
    def test_same(self, capsys: pytest.CaptureFixture[str], noise: float) -> None:
        code, text = run(capsys, Behaviour(noise=noise))
        assert code == 0, text
        assert "SUMMARY: kvfix verify same: 48 prompts" in text
        assert f"chunks of {CHUNK}" in text
        assert ("equal in every bit" in text) == (noise == 0.0)

    def test_every_hit_is_wrong(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, Behaviour(noise=0.01, wrong=every_hit))
        assert code == 1, text
        assert "SUMMARY: kvfix verify different: wrong for all hits, alone and under load" in text
        assert "kvfix explain KVF020" in text

    def test_nan_that_spoils_the_noise(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The survey finds it: from then on computed answers are NaN too, and so is the noise."""
        code, text = run(capsys, Behaviour(spreads_nan=True))
        assert code == 1, text
        assert "SUMMARY: kvfix verify different: the model computes NaN with KV from the connector" in text
        assert "restart the engine, and empty the cache" in text

    def test_one_border_is_wrong(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Found by fresh prompts of the kind: three of 48 answers alone are no proof."""
        wrong = lambda prompt, hit, together: len(prompt) == CHUNK  # noqa: E731
        code, text = run(capsys, Behaviour(noise=0.01, wrong=wrong))
        assert code == 1, text
        assert "wrong for 'one chunk', alone and under load" in text
        assert re.search(r"Fresh prompts of 'one chunk', alone: (\d) of \1 differ", text), text

    def test_one_number_of_chunks_is_wrong(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, Behaviour(noise=0.01, wrong=lambda prompt, hit, together: 0 < hit <= CHUNK))
        assert code == 1, text
        assert "SUMMARY: kvfix verify different: wrong where exactly 1 chunks come from the connector" in text

    def test_wrong_only_under_load(self, capsys: pytest.CaptureFixture[str]) -> None:
        wrong = lambda prompt, hit, together: together > 1  # noqa: E731
        code, text = run(capsys, Behaviour(noise=0.01, wrong=wrong))
        assert code == 1, text
        assert "only under load" in text

    def test_one_large_difference_that_nothing_repeats(self, capsys: pytest.CaptureFixture[str]) -> None:
        once: list[int] = []

        def wrong(prompt: list[int], hit: int, together: int) -> bool:
            if len(prompt) == CHUNK + 1 and not once:
                once.append(1)
                return True
            return False

        code, text = run(capsys, Behaviour(noise=0.01, wrong=wrong))
        assert code == 77, text
        assert "fresh prompts did not repeat this. Run again with --requests" in text

    def test_adapters_share_kv(self, capsys: pytest.CaptureFixture[str]) -> None:
        two = (("base", None), ("adapter", "base"))
        code, text = run(capsys, Behaviour(models=two))
        assert code == 0, text
        code, text = run(capsys, Behaviour(models=two, adapters_share=True))
        assert code == 1, text
        assert "adapter got KV of a prompt that was never sent to it" in text

    def test_an_adapter_has_the_context_length_of_its_base_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        two = (("base", None), ("adapter", "base"))
        code, text = run(capsys, Behaviour(models=two, length=250), model="adapter")
        assert code == 0, text

    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, Behaviour(noise=0.01, wrong=every_hit), json=True)
        answer = json.loads(text)
        assert code == answer["exit"] == 1
        assert answer["verdict"] == "different"
        assert answer["kinds"]["many chunks"]["above_limit"] == {"alone": 15, "under load": 15}
        assert answer["false_alarm_rate"] <= 1e-4


class TestServers:
    def test_fillers_empty_the_cache_where_there_is_no_reset(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, Behaviour(blocks=300, missing=("/reset_prefix_cache",)))
        assert code == 0, text
        assert "other prompts each time, which use all GPU blocks" in text
        code, text = run(capsys, Behaviour(blocks=300, missing=("/reset_prefix_cache",), wrong=every_hit))
        assert code == 1, text

    def test_texts_where_nothing_tokenizes(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, Behaviour(missing=("/tokenize",)))
        assert code == 0, text
        code, text = run(capsys, Behaviour(missing=("/tokenize",), wrong=every_hit))
        assert code == 1, text

    def test_no_connector(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, Behaviour(counts=False))
        assert code == 77
        assert "/metrics does not count the requests" in text
        code, text = run(capsys, Behaviour(connector=False))
        assert code == 77, text
        assert "vLLM never asked a connector. Start vLLM with --kv-transfer-config" in text

    def test_a_context_of_less_than_two_chunks(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, Behaviour(length=150))
        assert code == 77, text
        assert "two chunks of 64 tokens do not fit into the model's context of 150 tokens" in text

    def test_a_tokenizer_that_does_not_know_the_words(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, Behaviour(vocabulary=2))
        assert code == 2, text
        assert "makes only 2 different tokens" in text

    def test_nothing_is_stored(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, Behaviour(stores=False))
        assert code == 77, text
        assert "no token came from the connector" in text
        assert "PYTHONHASHSEED" in text

    def test_the_cache_is_too_small(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, Behaviour(keeps=8))
        assert code == 77, text
        assert "expected tokens came from the connector" in text
        assert "is too small for all prompts" in text

    def test_other_clients_hide_the_hits(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Wrong answers are found here too."""
        code, text = run(capsys, Behaviour(others=True))
        assert code == 77, text
        assert "SUMMARY: kvfix verify nothing proven: requests of other clients hide" in text
        code, text = run(capsys, Behaviour(others=True, wrong=every_hit))
        assert code == 1, text

    def test_no_prefix_cache(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, Behaviour(prefix_caching=False))
        assert code == 77, text
        assert "Start vLLM with --enable-prefix-caching" in text

    def test_metrics_are_hidden(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, Behaviour(missing=("/metrics",)))
        assert code == 77, text
        assert "Use the port of the engine, not of a proxy" in text

    def test_noise_hides_everything(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, Behaviour(noise=1.0))
        assert code == 77, text
        assert "the noise is too large" in text

    def test_a_key(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        code, text = run(capsys, Behaviour(key="secret-of-the-test"))
        assert code == 2, text
        assert "needs an API key. Give --api-key-env" in text
        code, text = run(capsys, Behaviour(key="secret-of-the-test"), api_key_env="KEY_OF_THE_TEST")
        assert (code, "KEY_OF_THE_TEST is not set" in text) == (2, True)
        monkeypatch.setenv("KEY_OF_THE_TEST", "secret-of-the-test")
        code, text = run(capsys, Behaviour(key="secret-of-the-test"), api_key_env="KEY_OF_THE_TEST")
        assert code == 0, text
        assert "secret-of-the-test" not in text

    def test_it_ends_in_the_middle(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, Behaviour(ends_after=50))
        assert code == 2, text
        assert "closed the connection during an answer" in text

    def test_no_server(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.verify(Options("http://127.0.0.1:1")) == 2
        assert "http://127.0.0.1:1 does not answer: " in capsys.readouterr().out

    def test_another_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, Behaviour(), model="large")
        assert code == 2, text
        assert "has no model 'large'. Give --model with one of: tiny" in text

    def test_out_of_time(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, Behaviour(), seconds=0.2)
        assert code == 77, text
        assert "Use a longer --seconds" in text


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
