"""KVF122 on LMCache's own client: when the connection is lost, the transfers in flight have failed, and only those."""

from __future__ import annotations

from typing import Any

import pytest

import kvfix
from tests.conftest import RELEASES, ForkServer


def lose_connection(fixes: bool) -> dict[str, Any]:
    """A load and a question are in flight when the server goes. A stream of LMCache's ends when its client sees it."""
    kvfix.apply(only=["KVF122"] if fixes else [])
    import zmq
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
    from lmcache.v1.multiprocess.transport.zmq_impl.wire import decode_operation

    context = zmq.Context()
    context.linger = 0  # what cannot be sent any more is dropped
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client: Any = RequestClientFactory.create(f"tcp://127.0.0.1:{port}", context=context)
    queue = client._message_queue_client
    key = IPCCacheServerKey("model", 1, 0, token_ids=(1,) * 16, start=0, end=16, request_id="r")
    load, ping, question = client.retrieve(key, 1, [[3]], b"", 0), client.ping(1), client.get_chunk_size()
    stream = client.subscribe_kv_events(1, "model", 0, 8)
    requests = {decode_operation(message[2]): message for message in (server.recv_multipart() for _ in range(4))}
    before = getattr(queue, "_kvfix_connected", False)
    server.send_multipart([*requests["ping"][:3], b"\xc3"])  # true
    ping.wait()
    connected = getattr(queue, "_kvfix_connected", False)
    server.close(linger=0)
    assert list(stream) == []
    failed = load.wait(30 if fixes else 0) and load.result() == (b"", False)
    after = getattr(queue, "_kvfix_connected", False)
    answer = {"connected": [before, connected, after], "failed": failed, "question": question.query()}
    client.close()
    context.term()
    return answer


@pytest.mark.parametrize("fixes", [False, True])
def test_a_lost_connection(fixes: bool, fork_server: ForkServer) -> None:
    done = fork_server(lose_connection, RELEASES / "0.5.6", fixes)
    assert done == {"connected": [False, fixes, False], "failed": fixes, "question": False}
