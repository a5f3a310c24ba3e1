import pytest

from kvfix_tools.diagnose import advice, problems
from tests.diagnose.lines import NEWEST, asked, codes, diagnose, finding_logs, logged, version

EVERY = [record.code for record in problems.catalogue() if record.on]
FOUND, ALIKE, SAYS = (finding_logs(kind) for kind in ("found", "alike", "says"))


@pytest.mark.parametrize("code", sorted({*EVERY, *FOUND}))
def test_is_found(code: str) -> None:
    assert FOUND[code]
    for log, says in zip(FOUND[code], SAYS[code] or [""] * len(FOUND[code]), strict=True):
        diagnosis = diagnose(log)
        assert code in codes(diagnosis), log[-2000:]
        found = next(each for each in diagnosis.findings if each.rule.code == code)
        assert found.sentence
        assert says in f"{found.sentence} ({found.verdict})"
        assert not says or codes(diagnosis) == [code]
        assert advice.cause(diagnosis, found)
        assert advice.advice(diagnosis, found)
        now = advice.remedy(diagnosis, found).now
        typed = now.startswith(("`", "kvfix run"))
        assert typed or code not in EVERY, f"a remedy must begin with a command: {now}"


@pytest.mark.parametrize("code", EVERY)
def test_is_not_found(code: str) -> None:
    assert ALIKE[code]
    for log in ALIKE[code]:
        assert code not in codes(diagnose(log)), log[-2000:]


def test_a_crash_has_one_name() -> None:
    for code, logs in FOUND.items():
        for log in logs if code < "KVD200" else []:
            found = codes(diagnose(log))
            assert [each for each in found if each < "KVD200"] == [code], found


def test_a_crash_without_its_lookup_is_found() -> None:
    assert [each.code for each in diagnose(FOUND["KVD107"][1]).findings[0].violated] == ["KVR011"]


def test_what_the_level_hides_is_unknown() -> None:
    """From 0.3.13 on, LMCache's adapter logs `Storing KV cache` only at DEBUG."""
    debug = logged(NEWEST, "storing", 256, 512, 256, "cmpl-1")
    load, store = "KVR004 load-differs-from-grant", "KVR007 store-leaves-hole"
    for release, more, hidden in ((NEWEST, "", [load, store]), (NEWEST, debug, []), ("0.3.12", "", [load])):
        diagnosis = diagnose(version(release), asked(release, 900, 0, 256, 256), more)
        assert [rule for rule, _, _ in diagnosis.hidden()] == hidden


def test_the_ledger_judges_log_lines() -> None:
    """The log shows LMCache issue 4508. The tokens between the hit and the store are never stored."""
    hole = logged("0.3.12", "storing", 512, 2048, 1536, "cmpl-1")
    (found,) = diagnose(asked("0.3.12", 4096, 0, 512, 512), hole).findings
    assert (found.rule.code, found.rule.fixes) == ("KVR007", ("KVF102",))
    assert "tokens 512 to 1536 are never stored" in found.sentence
    for release, fixes in (("0.3.10", {"KVF001"}), (NEWEST, set())):
        beyond = diagnose(version(release), asked(release, 900, 0, 1000, 1000))
        assert codes(beyond) == ["KVR001"]
        assert {each.name for each in advice.advice(beyond, beyond.findings[0])} >= fixes
        assert fixes or not advice.advice(beyond, beyond.findings[0])
    right = logged("0.3.12", "storing", 1536, 2048, 512, "cmpl-1")
    assert codes(diagnose(asked("0.3.12", 4096, 0, 512, 512), right)) == []
    alone = diagnose(hole)
    assert codes(alone) == []
    assert alone.unknowns["KVR007"] == 1


def test_a_history_has_each_event_with_its_line() -> None:
    """vLLM looks up a waiting request in every step. The history omits a lookup with an unchanged result."""
    ask = asked(NEWEST, 900, 64, 256, 192)
    diagnosis = diagnose(
        ask, ask, logged(NEWEST, "due", 256, 64, "cmpl-1"),
        logged(NEWEST, "retrieved", "cmpl-1", 192, 192, 256, 0.1, 1.0, 2.0, which="required"),
        logged(NEWEST, "storing", 256, 512, 256, "cmpl-1"), ask, asked(NEWEST, 900, 64, 128, 64),
    )  # fmt: skip
    assert [(event.line, event.what) for event in diagnosis.requests.history("cmpl-1")] == [
        (1, "lookup at 64 computed tokens promises 192: hit 256 - computed 64 = 192"),
        (3, "vLLM allocates blocks and grants 192 external tokens"),
        (3, "tokens 64 to 256 are to be loaded"),
        (4, "192 tokens loaded, up to 256"),
        (5, "tokens 256 to 512 stored"),
        (7, "lookup at 64 computed tokens promises 64: hit 128 - computed 64 = 64"),
    ]


def test_what_failed_in_the_server_stands_before_its_clients_silence() -> None:
    client = FOUND["KVD116"][-1]
    blocking, operation, *_ = FOUND["KVD212"]
    server = blocking + operation.replace("broken", "no such device")
    for log in (client + server, server + client):
        diagnosis = diagnose(log)
        assert codes(diagnosis) == ["KVD212", "KVD116"]
        cause, silence = diagnosis.findings
        assert any("no such device" in each.text for each in cause.evidence)
        if cause.began < silence.began:
            assert silence.follows is cause


def test_the_remedy_names_the_logged_error_before_a_fix() -> None:
    diagnosis = diagnose(logged(NEWEST, "degraded", "list index out of range"))
    found = next(each for each in diagnosis.findings if each.rule.code == "KVD207")
    now = advice.remedy(diagnosis, found).now
    assert now.startswith("`grep -n 'LMCache ERROR' LOG | head`")
    assert "KVF015" in now


def test_a_remedy_may_need_a_later_release_than_the_fix() -> None:
    diagnosis = diagnose(FOUND["KVD112"][1])
    assert "0.4.7" in advice.remedy(diagnosis, diagnosis.findings[0]).good
