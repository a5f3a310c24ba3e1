"""Wrong text after a late heartbeat: the worker drops transfers that the server still runs (LMCache 0.5.5 and earlier).

Symptom: The log has WARNING `LMCache server is unhealthy — entering degraded mode`, and some time later `LMCache server
is healthy again`. Then running requests, and later hits, return wrong text with HTTP 200 until the chunks are evicted.

Cause: As in KVF122, the worker drops the futures of all transfers, and reports the loads as failed and the stores as
done (vllm_multi_process_adapter.py 0.5.5:1857). vLLM frees the blocks, while a slow server still runs the transfers.

The worker cannot wait for the transfers, because a restarted server never finishes the transfers. The worker cannot
detect a restart, because the client does not watch the connection (multiprocess/mq.py 0.5.5:281), and a restarted
server answers pings like the old server.

Workaround: Use LMCache 0.5.6 with KVF122. Or set `lmcache.mp.heartbeat_interval` above the server's longest pause.
- Releases: LMCache 0.4.2 to 0.5.5. Tests show the bug in 0.4.5 to 0.4.7. For other releases, only the code was read.
"""

from kvfix.fixes.api import MP_WORKER_ADAPTER, Fix

FIX = Fix(
    MP_WORKER_ADAPTER.get_finished(broken=">=0.4.2,<=0.5.5", fix=None),
    effect="wrong output",
    evidence={"KVD204": r"^a ping timed out"},
    scenarios=("mp-silent-server-given-up",),
)
