"""OffloadingConnector's p2p tier reads the parameters of a request (KVF335). The lab does not have this tier."""

from types import SimpleNamespace
from typing import Any

from tests.conftest import RELEASES, Once

PEER = {"kv_request_id": "r", "remote_host": "peer", "remote_port": 1}
#: The parameters, and the policy that the tier asks for: it stores all of a request that another engine is to decode.
RIGHT = (
    ({}, "CHUNK_LEVEL"),
    ({"remote_prefiller": PEER}, "CHUNK_LEVEL"),
    ({"remote_kv_source": PEER}, "CHUNK_LEVEL"),
    ({"remote_decoder": {"kv_request_id": "r"}}, "REQUEST_LEVEL"),
    ({"remote_decoder": {"kv_request_id": 7}}, "REQUEST_LEVEL"),
    ({"remote_decoder": {}}, "CHUNK_LEVEL"),
)
MALFORMED: tuple[dict[str, Any], ...] = (
    *({role: value} for role in ("remote_prefiller", "remote_kv_source") for value in ("text", 3, [PEER])),
    *({"remote_decoder": value} for value in ("text", 0, [])),
    *({role: {**PEER, "kv_request_id": ["r"]}} for role in ("remote_prefiller", "remote_decoder")),
    {"remote_decoder": {"kv_request_id": {"r": 1}}},
    {"remote_prefiller": {**PEER, "remote_port": ["x"]}, "remote_decoder": 3},
)


def outcomes() -> list[str]:
    """Return the policy or the exception for each parameter, when a request is added, looked up, and ends."""
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.p2p.manager import P2PSecondaryTierManager

    found = []
    for params in [*(params for params, _ in RIGHT), *MALFORMED]:
        tier = P2PSecondaryTierManager.__new__(P2PSecondaryTierManager)  # its constructor wants NIXL and a port
        vars(tier).update(
            _sessions={}, _failed_req_ids=set(), _kv_to_session={}, _local_id="here",
            _control=SimpleNamespace(connect=lambda peer: None), _data=None,
        )  # fmt: skip
        context = ReqContext("r", params)
        try:
            policy = tier.on_new_request(context).policy.name
            tier.lookup(b"key", context)
            tier.on_request_finished(context)
            assert context.kv_transfer_params == params
        except Exception as error:  # noqa: BLE001 - what EngineCore dies of
            policy = type(error).__name__
        found.append(policy)
    return found


def test_malformed_parameters_end_no_engine(once: Once) -> None:
    released, fixed = once.both(outcomes, RELEASES / "0.5.6")
    right = [policy for _, policy in RIGHT]
    assert (released[: len(right)], fixed[: len(right)]) == (right, right)
    assert set(released[len(right) :]) == {"AttributeError", "TypeError"}
    assert set(fixed[len(right) :]) == {"CHUNK_LEVEL"}
