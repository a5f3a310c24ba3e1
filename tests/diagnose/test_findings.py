"""Each finding is found in its logs, and not in logs that only look like it (finding_logs.py)."""

import pytest

from kvfix_tools.diagnose import advice, problems
from tests.diagnose.finding_logs import DUMP, hits, lookups, misses, without_hits, worker
from tests.diagnose.lines import NEWEST, asked, codes, crash, diagnose, handler_failed, logged, raised, version

EVERY = pytest.mark.parametrize("code", [record.code for record in problems.catalogue() if record.on])


@EVERY
def test_is_found(code: str) -> None:
    assert hits()[code]
    for log in hits()[code]:
        diagnosis = diagnose(log)
        assert code in codes(diagnosis), log[-2000:]
        found = next(each for each in diagnosis.findings if each.rule.code == code)
        assert found.sentence
        assert advice.cause(diagnosis, found)
        assert advice.advice(diagnosis, found)
        now = advice.remedy(diagnosis, found).now
        assert now.startswith(("`", "kvfix run")), f"what to do begins with what can be typed: {now}"


@EVERY
def test_is_not_found(code: str) -> None:
    """In what looks like it and is right, and in what is another crash."""
    logs = [log for about, log in misses() if about == code]
    assert logs
    for log in logs:
        assert code not in codes(diagnose(log)), log[-2000:]


def test_a_crash_has_one_name() -> None:
    for code, logs in hits().items():
        for log in logs if code < "KVD200" else []:
            found = codes(diagnose(log))
            assert [each for each in found if each < "KVD200"] == [code], found


RANKS = logged(NEWEST, "ranks_differ", "[256, 0]")
#: An object that is dropped raises because an earlier failure has left it half made.
DROPPED = raised([("vllm/any_connector.py", "__del__", "self.close()")], "AttributeError: no attribute 'context'")
LOADING = ("vllm/distributed/kv_transfer/kv_connector/v1/my.py", "start_load_kv", "self.files.append(open(path))")


@pytest.mark.parametrize(
    ("log", "code", "says"),
    [
        # No line names the release: 1511 of vllm_v1_adapter.py is where 0.3.10 says `Reqid`. The next log shows none.
        (hits()["KVD101"][1], "KVD101", "(violated)"),
        (hits()["KVD101"][2], "KVD101", "with max_tokens_per_load set, it is KVD102 (unknown)"),
        # The log begins after the request did: the crash has its name, and nothing is made up of the balance.
        (version(NEWEST) + crash(NEWEST, "resume_differs", "r1", 800, 1024, False), "KVD107",
         "The log has no lookup of this request: below min_retrieve_tokens it is KVD103 (unknown)"),
        # With PD a chunk goes with the first request that fetched it, so a rank may miss with right hashes.
        (logged(NEWEST, "configured", "{'enable_pd': False, 'pd_role': None}") + RANKS, "KVD304", "(violated)"),
        (logged(NEWEST, "configured", "{'enable_pd': True, 'pd_role': 'receiver'}") + RANKS, "KVD304", "(unknown)"),
        (logged("0.3.9", "engine_configured", "{'pd_role': None, 'nixl_role': 'receiver'}") + RANKS, "KVD304",
         "(unknown)"),
        (RANKS, "KVD304", "hit tokens by rank: [256, 0] (unknown)"),
        (worker(chunk=512) + lookups(10, 300), "KVD320", "a chunk has 512 tokens (violated)"),
        (lookups(10, 26), "KVD320", "10 lookups of up to 26 tokens, no stores, 0 hits; a chunk has 256 tokens, if "
         "chunk_size is the default (unknown)"),
        (without_hits()["KVD322"][0], "KVD322", "10 lookups, 10 stores, 0 hits; vLLM itself had at most 128 tokens of "
         "a prompt, and a chunk has 256 tokens"),
        (without_hits()["KVD323"][0], "KVD323", "10 lookups hit up to 256 tokens, but loaded none: min_retrieve_tokens "
         "is 512"),
        (without_hits()["KVD326"][0], "KVD326", "model /m/a and /models/a; ranks 1 and 2"),
        (DUMP, "KVD213", "VLLM::EngineCore pid=4242 is in get_num_new_matched_tokens, idle in poll "
         "(sugar/socket.py:1030) (unknown)"),
        # A general record has the place and the hook of an unknown failure.
        (raised([LOADING], "OSError: [Errno 24] Too many open files"), "KVD219", "v1/my.py:7 in start_load_kv, "
         "`self.files.append(open(path))`, raised by vLLM, in the hook start_load_kv"),
        (DROPPED, "KVD199", "'context'"),
        (DROPPED + raised([("vllm/any.py", "start", "open_device()")], "LookupError: no device 7"), "KVD199",
         "LookupError: no device 7"),
        # The words of an exception of C++ are the failure.
        ("terminate called after throwing an instance of 'std::runtime_error'\n  what():  no slot 7\n", "KVD249",
         "RuntimeError: no slot 7"),
    ],
)  # fmt: skip
def test_the_sentence_of_a_finding(log: str, code: str, says: str) -> None:
    (found,) = diagnose(log).findings
    assert found.rule.code == code
    assert says in f"{found.sentence} ({found.verdict})"


def test_what_the_level_hides_is_unknown() -> None:
    """From 0.3.13 on stores are logged at DEBUG only."""
    debug = logged(NEWEST, "storing", 256, 512, 256, "cmpl-1")
    load, store = "KVR004 load-differs-from-grant", "KVR007 store-leaves-hole"
    for release, more, hidden in ((NEWEST, "", [load, store]), (NEWEST, debug, []), ("0.3.12", "", [load])):
        diagnosis = diagnose(version(release), asked(release, 900, 0, 256, 256), more)
        assert [rule for rule, _, _ in diagnosis.hidden()] == hidden


def test_the_ledger_judges_log_lines() -> None:
    """LMCache issue 4508 in a log: the tokens between the hit and the store are never stored."""
    hole = logged("0.3.12", "storing", 512, 2048, 1536, "cmpl-1")
    (found,) = diagnose(asked("0.3.12", 4096, 0, 512, 512), hole).findings
    assert (found.rule.code, found.rule.fixes) == ("KVR007", ("KVF102",))
    assert "512 to 1536 never are" in found.sentence
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
    """A request that waits is asked about on every step: the same answer again is no event."""
    ask = asked(NEWEST, 900, 64, 256, 192)
    diagnosis = diagnose(
        ask, ask, logged(NEWEST, "due", 256, 64, "cmpl-1"),
        logged(NEWEST, "retrieved", "cmpl-1", 192, 192, 256, 0.1, 1.0, 2.0, which="required"),
        logged(NEWEST, "storing", 256, 512, 256, "cmpl-1"), ask, asked(NEWEST, 900, 64, 128, 64),
    )  # fmt: skip
    assert [(event.line, event.what) for event in diagnosis.requests.history("cmpl-1")] == [
        (1, "match(64) promises 192: hit 256 - computed 64 = 192"),
        (3, "blocks found, 192 external tokens granted"),
        (3, "tokens 64 to 256 are to be loaded"),
        (4, "192 tokens loaded, up to 256"),
        (5, "tokens 256 to 512 stored"),
        (7, "match(64) promises 64: hit 128 - computed 64 = 64"),
    ]


def test_a_crash_without_its_lookup_is_found() -> None:
    """The log begins after the request did: the crash has its name, and nothing is made up of the balance."""
    diagnosis = diagnose(version(NEWEST), crash(NEWEST, "resume_differs", "r1", 800, 1024, False))
    assert [each.code for each in diagnosis.findings[0].violated] == ["KVR011"]


def test_what_failed_in_the_server_stands_before_its_clients_silence() -> None:
    client = hits()["KVD116"][-1]
    server = handler_failed() + handler_failed("Error handling operation register_kv_cache", "no such device")
    for log in (client + server, server + client):
        diagnosis = diagnose(log)
        assert codes(diagnosis) == ["KVD212", "KVD116"]
        cause, silence = diagnosis.findings
        assert any("no such device" in each.text for each in cause.evidence)
        if cause.began < silence.began:
            assert silence.follows is cause


def test_what_the_log_says_is_put_right_before_a_fix_is_taken() -> None:
    diagnosis = diagnose(logged(NEWEST, "degraded", "list index out of range"))
    found = next(each for each in diagnosis.findings if each.rule.code == "KVD207")
    now = advice.remedy(diagnosis, found).now
    assert now.startswith("`grep -n 'LMCache ERROR' LOG | head`")
    assert "KVF015" in now


def test_what_ends_it_may_be_more_than_the_release_of_the_fix() -> None:
    diagnosis = diagnose(hits()["KVD112"][1])
    assert "0.4.7" in advice.remedy(diagnosis, diagnosis.findings[0]).good
