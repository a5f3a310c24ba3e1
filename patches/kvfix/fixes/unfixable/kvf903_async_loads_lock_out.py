"""All requests wait for ever: requests that load between steps hold the blocks that each needs for its last tokens.

## Symptom
`Running: 0 reqs, Waiting: N reqs`, no throughput, no error, the KV cache nearly full. Under pressure, with a connector
that loads between steps.

## Cause
A load holds its blocks, cannot be preempted, and needs one more block to start. If vLLM admits loads until the last
block is taken, no request gets that block. vLLM reserves blocks for it since 0.26 at the latest (`reserved_blocks`),
and for the tokens of speculative decoding since 0.32 at the latest (`_spec_decode_step_blocks`). Up to 0.26 a waiting
request that holds no blocks may also stand before those that hold them, and no other is asked. The check is in the
middle of `schedule`, 500 lines that differ in every release.

## Workaround
vLLM 0.32 with `scheduler_reserve_full_isl` as it comes (true). 0.32.0 still locks out without it and with the priority
policy (KVF208), with sliding windows (KVF210), and with a session (KVF219). KVF210 is a default fix. Name the other
two: `kvfix run --plus KVF208 --plus KVF219 -- CMD`. Else fewer requests at once (`--max-num-seqs`), more blocks, or no
asynchronous loading.

## Releases
vLLM 0.11.2 to 0.26.0. Read in the source and reported, not shown in the lab.

## Upstream
https://github.com/vllm-project/vllm/issues/45388, https://github.com/vllm-project/vllm/pull/44560,
https://github.com/vllm-project/vllm/pull/57104, https://github.com/vllm-project/vllm/pull/57841

## Remove when
vLLM 0.26 is no longer in use.
"""

from __future__ import annotations

from kvfix.fixes import stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import SCHEDULER

FIX = Fix(
    __name__,
    __doc__,
    effect="hang",
    targets=(SCHEDULER.schedule(broken="<0.32", probe=stubs.cannot_tell, fix=None),),
    evidence={"KVD202": ""},
)
