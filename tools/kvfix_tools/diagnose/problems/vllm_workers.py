"""A worker of vLLM finds its own state broken in a step: drafts with recurrent state, block tables, sleep."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_WORKER = "vllm/v1/worker/gpu_worker.py"
_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_DYNAMO = "https://github.com/ai-dynamo/dynamo/issues"

PROBLEMS = (
    Problem(
        code="KVD089",
        name="drafts-without-a-step-before",
        severity=Severity.CRASH,
        title="Drafts are to be verified with recurrent state of a step that this worker has not computed.",
        shows=(
            Failed(kind="AssertionError", source="num_accepted is not None", through="layers/mamba/"),
            Failed(kind="AssertionError", source="num_accepted_tokens is not None", through="layers/mamba/"),
            Failed(kind="AssertionError", source="spec_state_indices_tensor is not None", through="layers/mamba/"),
            Failed(kind="AssertionError", source="spec_query_start_loc is not None", through="layers/mamba/"),
            Failed(kind="AssertionError", text="mamba_state_idx missing entry for <request>"),
        ),
        cause="With speculative decoding a Mamba or GDN layer needs to know how many drafts of the step before were "
        "accepted. A request whose prompt came from a connector (P/D, offloading) has no step before on this engine.",
        now="without --speculative-config on the instance that loads (decode), and restart; prefill may keep it",
        good="no release of vLLM up to 0.33.0 is known to be right for every such model: keep drafts off on decode",
        sure=False,
        threads=(f"{_DYNAMO}/12198",),
    ),
    Problem(
        code="KVD090",
        name="block-table-row-full",
        severity=Severity.CRASH,
        title="A request has more blocks than its row in the worker's block table.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="Block table write for request <row>, group <group> exceeds row capacity (<blocks> > <room>)",
                at="vllm/v1/worker/gpu/block_table.py",
            ),
        ),
        sentence="{blocks} blocks of KV group {group}, room for {room}",
        releases={"vllm": ">=0.32"},
        cause="A row holds --max-model-len divided by the group's block size (and blocks for drafts). More come where "
        "blocks are appended twice: a resumed request, a load that failed and is computed anew, or blocks counted in "
        "another size than the group's.",
        now="a larger --max-model-len than any request needs, until it is found; without --async-scheduling; "
        "KVFIX=check kvfix run -- CMD names the request",
        good="report it with `kvfix-diagnose LOG --issue FILE.md`",
        sure=False,
    ),
    Problem(
        code="KVD091",
        name="sleep-finds-more-memory",
        severity=Severity.CRASH,
        title="An engine that was put to sleep holds more GPU memory than before.",
        shows=(Failed(kind="AssertionError", text="Memory usage increased after sleeping.", at=_WORKER),),
        releases={"vllm": ">=0.15"},
        cause="Free memory of the whole GPU is compared before and after. Another process (a second engine, an LMCache "
        "server that opens the memory) took some in between, or requests were running.",
        now="pause and wait until no request runs, then sleep; one engine at a time on a GPU",
        good="the order",
    ),
    Problem(
        code="KVD092",
        name="one-sleeping-engine-for-a-process",
        severity=Severity.CRASH,
        title="Two engines with --enable-sleep-mode are made in one process.",
        shows=(Failed(kind="AssertionError", text="can only be used for one instance per process"),),
        cause="The allocator that can give GPU memory back is one for each process.",
        now="one engine for each process (VLLM_ENABLE_V1_MULTIPROCESSING=1, no second LLM(...) in the same one), or "
        "without --enable-sleep-mode",
        good="the set-up",
    ),
    Problem(
        code="KVD657",
        name="encoder-output-gone",
        severity=Severity.CRASH,
        title="The encoder's output of an image or audio is gone when the tokens behind it are computed.",
        shows=(Failed(text="Encoder cache miss for <hash>"),),
        cause="vLLM computes an image once, and leaves it out where its tokens are computed already or come from the "
        "connector. A load that ends within an image, or fails and is rolled back into one, needs an output that was "
        "never made or has been freed.",
        now="requests with images to an instance without --kv-transfer-config; or --no-enable-prefix-caching with the "
        "connector; a larger --max-num-batched-tokens, so that an image is not split",
        good="report it with `kvfix-diagnose LOG --issue FILE.md`: no release up to 0.33.0 is known to be right",
        sure=False,
    ),
    Problem(
        code="KVD1510",
        name="drafts-past-the-context",
        severity=Severity.CRASH,
        title="A request that was taken up again got draft tokens up to --max-model-len, and the token after them has "
        "no place.",
        shows=(
            Failed(
                text="Sampled token IDs exceed the max model length. Total number of tokens: <tokens> > "
                "max_model_len: <most>",
            ),
        ),
        sentence="{tokens} tokens with the sampled one",
        releases={"vllm": ">=0.26,<0.32"},
        cause="A preempted or loaded request with one token to compute is padded to 1 + num_speculative_tokens. "
        "0.26 asks only that these fit into --max-model-len (v1/core/sched/scheduler.py, `schedule`), not the token "
        "that is sampled behind them. Prefix caching and KV offloading make such requests. Without "
        "--speculative-config it is another thing: a prompt of the full length.",
        now="without --speculative-config; or the clients' prompt and max_tokens together below --max-model-len by at "
        "least 2 + num_speculative_tokens; restart",
        fixed={"vllm": "0.32.0"},
        threads=("https://github.com/vllm-project/vllm/pull/53812",),
        sure=False,
    ),
    Problem(
        code="KVD1512",
        name="fast-prefill-with-prompt-logprobs",
        severity=Severity.CRASH,
        title="A request asked for logprobs of its prompt, which --kv-sharing-fast-prefill does not compute.",
        shows=(
            Failed(
                kind="AssertionError",
                text="--kv-sharing-fast-prefill produces incorrect logprobs for prompt tokens",
                at=_RUNNER,
            ),
        ),
        releases={"vllm": ">=0.11"},
        cause="With KV sharing the later layers skip the prompt's tokens. The API server refuses such requests; one "
        "that comes around it (LLM class, another front end) ends the worker.",
        now="without --kv-sharing-fast-prefill; or no `prompt_logprobs` in the requests (evaluations send it); restart",
        good="the option or the request",
    ),
)
