from pathlib import Path

import pytest

from kvfix_tools.diagnose import command, report_brief
from kvfix_tools.diagnose.command import Options
from kvfix_tools.diagnose.diagnosis import Diagnosis, diagnosed
from tests.diagnose.lines import CORE, FATAL, LMCACHE, LOGS, real

CRASH = real("crash-0.3.10")


def brief(log: bytes) -> str:
    found = diagnosed(log)
    return report_brief.brief(found, found.findings)


@pytest.mark.parametrize("name", sorted(path.name.removesuffix(".log.gz") for path in LOGS.glob("*.gz")))
def test_every_log_fits(name: str) -> None:
    for times in (1, 40):
        text = brief(real(name) * times)
        assert 0 < len(text.encode()) <= report_brief.LIMIT
        assert text.endswith("\n")


def test_the_summary_has_the_main_facts() -> None:
    text = brief(CRASH)
    for part in (
        "releases: LMCache 0.3.10, vLLM 0.32.0",
        "connector: LMCacheConnectorV1; role: kv_both",
        "setting: max_num_batched_tokens=352",
        "exception of EngineCore pid=4427, line 137: AssertionError: Mismatch in tokens to load: 256 vs 256",
        "integration/vllm/vllm_v1_adapter.py:1589 update_state_after_alloc",
        "do now: kvfix run -- CMD, or kvfix.apply() (KVF001",
        "for good: upgrade to LMCache 0.3.10.post1",
    ):
        assert part in text


def test_the_summary_has_an_unknown_failure() -> None:
    lines = ("Traceback (most recent call last):", '  File "/home/ada/mine.py", line 7, in load', "mine.OddError: odd")
    log = "".join(f"{CORE}{line}\n" for line in lines).encode()
    text = brief(log)
    assert all(part in text for part in ("KVD199", "mine.OddError: odd", "<file>:7 load"))
    assert "/home/ada" not in text
    found = diagnosed(log)
    assert report_brief.issue(found, found.findings).startswith("# EngineCore_DP0 died: mine.OddError: odd")


SECRETS = [
    "prompt='tell me about my secret illness'",
    'prompt: "tell me about my secret illness"',
    "messages=[{'role': 'user', 'content': 'my secret illness'}]",
    "redis://user:pa55word@10.1.2.3:6379 refused",
    "tcp://gpu-node-17.corp.example:5555 is silent",
    "api_key=sk-abcdefghijklmnop1234 refused",
    "token ids [15496, 995, 318, 257, 1332, 286, 262, 3496, 99, 100]",
    "cannot read /home/ada/models/private-model/config.json",
    "[Errno 2] No such file or directory: 'private-model.safetensors'",
    "cannot open ../private-model/weights.bin",
    "cannot open /srv/ada/private-model of ours/weights.bin",
    "cannot open models/private-model/weights.bin",
]
HIDDEN = "secret illness", "pa55word", "10.1.2.3", "gpu-node-17", "sk-abcdef", "15496", "/home/ada", "private-model"


@pytest.mark.parametrize("secret", SECRETS)
def test_nothing_that_must_not_be_posted(secret: str) -> None:
    text = f"it failed: {secret}"
    found = diagnosed(f"{LMCACHE.format(level='ERROR', text=text)}{FATAL}{CORE}RuntimeError: {text}\n".encode())
    for text in (report_brief.brief(found, found.findings), report_brief.issue(found, found.findings)):
        assert "it failed" in text
        assert not [word for word in HIDDEN if word in text], text


def test_the_bug_report(tmp_path: Path) -> None:
    log, out = tmp_path / "engine.log", tmp_path / "issue.md"
    log.write_bytes(CRASH)
    assert command.main([str(log)], Options(issue=str(out), brief=str(tmp_path / "brief.txt"))) == 1
    text = out.read_text()
    title = "# EngineCore died: AssertionError: Mismatch in tokens to load, LMCache 0.3.10, vLLM 0.32.0\n"
    assert text.startswith(title)
    assert not [name for name in ("engine.log", str(tmp_path)) if name in text]
    assert "lookup at 288 computed tokens promises 0" in text
    assert (tmp_path / "brief.txt").read_text().rstrip() in text
    assert "https://github.com/LMCache/LMCache/issues/2158" in text.partition("## Known reports")[2]


def test_an_empty_log() -> None:
    assert "no line of vLLM" in report_brief.brief(Diagnosis(), [])
