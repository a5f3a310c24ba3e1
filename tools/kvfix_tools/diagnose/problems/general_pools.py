"""LMCache's pools when they are full: what their warnings mean where nothing else is known."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

PROBLEMS = (
    Problem(
        code="KVD171",
        name="pool-is-full",
        general=True,
        severity=Severity.SLOW,
        title="LMCache's pool in host memory is full at this moment.",
        shows=(
            Logged("Failed to allocate memory block of size <size> because no memory is available"),
            Logged("Failed to batched allocate <count> memory blocks of size <size> because no enough memory"),
            Failed(kind="RuntimeError", text="because no memory is available"),
        ),
        sure=False,
        cause="A warning for each first try; then chunks are evicted and it tries again, so that a full pool alone is "
        "normal: a line `Stored ...` after it says that it went well. It is a fault with `No eviction candidates "
        "found` or `choosing to not store`: all chunks are pinned or being written, or one request needs more than "
        "the pool.",
        now="count `Stored` beside it; where nothing is stored: a larger max_local_cpu_size (GB for each worker) or "
        "--l1-size-gb, and restart; idle and still so: chunks are leaked: kvfix run -- CMD, and upgrade",
        good="a pool of twice what the prompts that run at once need; LMCache 0.5.6, which leaks least",
        threads=("https://github.com/LMCache/LMCache/issues/3187",),
    ),
    Problem(
        code="KVD195",
        name="fewer-tokens-than-promised",
        general=True,
        severity=Severity.WRONG,
        title="A load brought fewer tokens than the lookup had found.",
        shows=(Logged("The number of retrieved tokens is less than the expected number of tokens!"),),
        sure=False,
        cause="The next line has the numbers. Between lookup and load the chunks were evicted, the store lost them, "
        "or the CPU pool had no room to read them into. vLLM computes them again from 0.12 on; before it may have "
        "read what was in the blocks. LMCache 0.3.1 does it without any of these: it cuts the tokens wrongly. Before "
        "0.3.3 rank 0 alone is asked: the other ranks' chunks are not pinned, and are evicted under load.",
        now="LMCache before 0.3.3: 0.3.9 or newer; the line before it names the store that failed; a "
        "larger max_local_cpu_size; kvfix run -- CMD (KVF007, KVF203) keeps what was not loaded out of both caches",
        good="room for all prompts that run at once; a store that does not evict what is looked up",
    ),
)
