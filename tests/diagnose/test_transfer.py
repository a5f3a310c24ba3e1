"""What P/D transfer leaves in a log, told apart: Mooncake's own lines, NIXL's, KVBM's; one finding for one failure."""

from __future__ import annotations

from tests.diagnose.lines import codes, diagnose, stats
from tests.diagnose.test_bare_lines import raised


def test_a_refused_registration_of_mooncake_is_named_by_its_reason() -> None:
    """The card's answer decides; that the same memory is then of no card is not a second finding, nor a disk's."""
    line = "{level}0326 14:23:05.675921 18944 {file}] {text}\n"
    refused = line.format(level="E", file="rdma_context.cpp:265", text="Failed to register memory 0x7f105035d000: {}")
    after = line.format(
        level="E",
        file="rdma_transport.cpp:529",
        text="Memory region not registered by any active device(s): 0x7f3e26088000",
    )
    assert codes(diagnose(refused.format("Bad address [14]"))) == ["KVD010"]
    assert codes(diagnose(refused.format("Cannot allocate memory [12]"))) == ["KVD011"]
    assert codes(diagnose(refused.format("Input/output error [5]"), after)) == ["KVD012"]
    assert codes(diagnose(after)) == ["KVD014"]


def test_one_failure_has_one_finding() -> None:
    """The record that says more replaces those that say less of it."""
    ep = raised(
        [("vllm/distributed/device_communicators/all2all.py", "<module>", "import nixl_ep"),
         ("nixl_ep/__init__.py", "<module>", "import nixl_ep_cpp")],
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
    )  # fmt: skip
    assert codes(diagnose(ep)) == ["KVD151"]
    gone = raised(
        [("vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py", "_pop_done_transfers", "check()")],
        "nixl_cu12._bindings.nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT",
    )
    failed = (
        "(Worker pid=7) ERROR 12-03 01:24:36 [base_worker.py:1260] "
        "NIXL transfer failure: transfer_failed | Context: {}\n"
    )
    engine = "INFO 12-03 01:24:30 [core.py:69] Initializing a V1 LLM engine (v0.32.0) with config: model='m'\n"
    assert codes(diagnose(engine, failed, gone)) == ["KVD591"]


def test_the_place_of_a_statement_says_which_connector_ran() -> None:
    line = "(Worker pid=7) ERROR 12-03 01:24:36 [nixl_connector.py:815] Something failed\n"
    assert diagnose(line).who.connectors == {"NixlConnector"}


def test_a_worker_that_mooncakes_master_drops_is_told_of_at_info() -> None:
    expired = "I0929 15:50:18.427733   862 master_service.cpp:913] client_id=49-53, action=client_expired\n"
    assert codes(diagnose(expired)) == ["KVD196"]
    assert codes(diagnose(expired.replace("client_expired", "client_mounted"))) == []


def test_rust_that_panics_is_a_death() -> None:
    panic = "thread 'tokio-runtime-worker' panicked at /opt/dynamo/lib/llm/src/block_manager/pool.rs:220:69:\n"
    assert codes(diagnose(panic)) == ["KVD199"]


def test_a_stuck_pull_of_mooncake_is_told_once_and_by_its_cause() -> None:
    """vLLM leaves the request waiting: that nothing moves is what follows, and no fix for other causes is offered."""
    pulled = (
        "(Worker pid=7) ERROR 12-03 01:24:36 [mooncake_connector.py:1900] pulling kv_caches for r-1 failed: "
        "Mooncake transfer engine returned -1\n"
    )
    assert codes(diagnose(pulled, *[stats(waiting=1)] * 4)) == ["KVD502"]
