"""Wrong text after a late heartbeat: the worker drops transfers that the server still does (LMCache 0.5.5 and earlier).

## Symptom
WARNING `LMCache server is unhealthy — entering degraded mode`, and some time later `LMCache server is healthy again`.
Then wrong text with HTTP 200: of running requests, and of prompts that hit the cache, until the chunks are evicted.

## Cause
That of KVF122: the worker drops the futures of all transfers and reports them (vllm_multi_process_adapter.py
0.5.5:1856), vLLM frees the blocks, and a server that was only slow does the transfers afterwards. A worker may give up
what the server will not do any more, and nothing else. Up to 0.5.5 its client does not watch the connection
(multiprocess/mq.py 0.5.5:281), and a server that was started anew answers pings like the one before: a worker that
waited would wait for ever for what was lost with the old one.

## Workaround
LMCache 0.5.6 with kvfix, which has KVF122. Else `lmcache.mp.heartbeat_interval` (seconds) longer than anything that may
keep the server from an answer.

## Releases
LMCache 0.4.2 to 0.5.5. The lab shows it in 0.4.5, 0.4.6 and 0.4.7; of the others it was read in the source.

## Upstream
None known.

## Remove when
LMCache 0.5.5 is no longer in use.
"""

from __future__ import annotations

from kvfix.fixes import stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import MP_WORKER_ADAPTER

FIX = Fix(
    __name__,
    __doc__,
    effect="wrong output",
    targets=(MP_WORKER_ADAPTER.get_finished(broken=">=0.4.2,<=0.5.5", probe=stubs.cannot_tell, fix=None),),
    evidence={"KVD204": r"^a ping timed out"},
    scenarios=("mp-silent-server-given-up",),
)
