"""All requests wait for ever: loading requests take all blocks, and no request gets the last block that it needs.

Symptom: vLLM logs `Running: 0 reqs, Waiting: N reqs`, without throughput and without an error. The KV cache is nearly
full. The bug needs more requests than the blocks can hold, and a connector that loads asynchronously.

Cause: A loaded request holds its blocks, cannot be preempted, and needs another block to run. If vLLM admits loads
until loads hold all blocks, no request gets another block. In vLLM 0.26, a load must leave enough free blocks for the
prefills in flight (`reserved_blocks`). vLLM 0.32 also reserves blocks for draft tokens (`_spec_decode_step_blocks`). Up
to 0.26, if the first waiting request cannot get blocks, vLLM does not try to schedule the loaded requests behind this
request. kvfix cannot wrap a part of `schedule`, a function of 500 lines that differs in every release.

Workaround: Use vLLM 0.32 with `scheduler_reserve_full_isl` at its default (true). If you cannot upgrade, allow fewer
requests at once (`--max-num-seqs`), use more blocks, or switch asynchronous loading off.

vLLM 0.32.0 can still hang with a streaming session (KVF219), with sliding windows (KVF210), or with priorities if
`scheduler_reserve_full_isl` is off (KVF208). KVF210 is a default fix. Add the other two fixes:
`kvfix run --plus KVF208 --plus KVF219 -- CMD`.
- Releases: vLLM up to 0.26.0, and perhaps up to 0.31 (code not read). Users have reported the bug. The lab does not
  show the bug.
- Upstream: https://github.com/vllm-project/vllm/issues/45388, https://github.com/vllm-project/vllm/pull/44560,
  https://github.com/vllm-project/vllm/pull/57104, https://github.com/vllm-project/vllm/pull/57841
"""

from kvfix.fixes.api import SCHEDULER, Fix

FIX = Fix(SCHEDULER.schedule(broken="<0.32", fix=None), effect="hang", evidence={"KVD202": ""})
