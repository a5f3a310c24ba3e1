"""Requests that are loaded between steps take the blocks that each other's last tokens need, and none ever starts.

## Symptom
`Running: 0 reqs, Waiting: N reqs`, no throughput, no error, the KV cache nearly full. Under pressure, with a connector
that loads between steps.

## Cause
A load holds its blocks, cannot be preempted, and needs one more block to start. Where loads are admitted until the last
block is gone, none gets it. vLLM keeps blocks back for that since 0.26 at the latest (`reserved_blocks`), and for the
tokens of speculative decoding since 0.32 at the latest (`_spec_decode_step_blocks`). The guard is in the middle of
`schedule`, 500 lines that differ in every release.

## Workaround
vLLM 0.32, or 0.26 without speculative decoding. Else fewer requests at once (`--max-num-seqs`), more blocks, or no
asynchronous loading.

## Releases
vLLM 0.11.2 to 0.26.0; 0.26.0 with speculative decoding only. Read in the source and reported, not shown in the lab.

## Upstream
https://github.com/vllm-project/vllm/issues/45388, https://github.com/vllm-project/vllm/pull/44560,
https://github.com/vllm-project/vllm/pull/57104

## Remove when
vLLM 0.26 is no longer in use.
"""

from __future__ import annotations

from kvfix import probe
from kvfix.fix import Fix, Patch

FIX = Fix(
    __name__,
    __doc__,
    patches=(Patch("vllm", "vllm.v1.core.sched.scheduler", "Scheduler.schedule", "<0.32", probe.cannot_tell, None),),
)
