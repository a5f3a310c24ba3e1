"""vLLM's counts of a step that do not add up: what was scheduled, what came back, what a connector answered."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_SCHEDULER = "vllm/v1/core/sched/scheduler.py"
_ASYNC = "vllm/v1/core/sched/async_scheduler.py"
_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_LOCAL = "report it with `kvfix-diagnose LOG --issue FILE.md`: no release is known to be right"
_CHECK = "`kvfix run --mode check -- CMD` names the hook that answers too much"

PROBLEMS = (
    Problem(
        code="KVD009",
        name="hit-longer-than-the-prompt",
        severity=Severity.CRASH,
        title="A request that was never preempted is said to have more computed tokens than its prompt has.",
        shows=(
            Failed(
                kind="AssertionError",
                within="scheduler.py:schedule",
                source="assert num_computed_tokens <= request.num_prompt_tokens",
                at=_SCHEDULER,
            ),
        ),
        releases={"vllm": ">=0.20"},
        sure=False,
        cause="num_computed_tokens is vLLM's own prefix hit plus the external tokens that get_num_new_matched_tokens "
        "promised. The own hit is at most the prompt less one token, so the connector's answer is too large: it "
        "counted tokens from the prompt's start as if they came after the own hit, or it looked up output tokens (a "
        "request that goes on after a load that failed, or a session). The lookup line of the same request decides.",
        now=f"{_CHECK}; until then --no-enable-prefix-caching, so that the own hit is 0, or without the connector",
        good=_LOCAL,
    ),
    Problem(
        code="KVD087",
        name="more-output-than-was-awaited",
        severity=Severity.CRASH,
        title="A step brought more tokens for a request than asynchronous scheduling awaited.",
        shows=(
            Failed(
                kind="AssertionError",
                within="async_scheduler.py:_update_request_with_output",
                source="assert request.num_output_placeholders >= 0",
                at=_ASYNC,
            ),
            Failed(
                kind="AssertionError",
                within="scheduler.py:update_from_output",
                source="assert request.num_stale_output_tokens >= 0",
            ),
            Failed(
                kind="AssertionError",
                within="scheduler.py:_handle_stopped_request",
                source="assert safe_frontier >= 0",
            ),
        ),
        releases={"vllm": "<0.33"},
        sure=False,
        cause="Each step that is scheduled ahead adds its tokens to num_output_placeholders, and its output takes "
        "them off again. A preemption, a load of KV that failed or a reset of the prefix cache sets the count to 0 "
        "while a step is in flight; the output of that step then takes off what is no longer there. The last line "
        "about the same request (preempted, `KV load failure`, reset) decides which.",
        now="--no-async-scheduling; restart",
        good=_LOCAL,
    ),
    Problem(
        code="KVD100",
        name="request-runs-twice",
        severity=Severity.CRASH,
        title="The scheduler's list of running requests holds more than it should.",
        shows=(
            Failed(
                kind="AssertionError",
                within="scheduler.py:schedule",
                source="assert len(self.running) <= self.max_num_running_reqs",
                at=_SCHEDULER,
            ),
            Failed(
                kind="AssertionError",
                within="scheduler.py:schedule",
                source="assert len(scheduled_new_reqs) + len(scheduled_resumed_reqs)",
            ),
            Failed(
                kind="AssertionError",
                within="scheduler.py:_preempt_request",
                text="Only running requests can be preempted",
            ),
        ),
        sure=False,
        cause="A request stands in two lists. vLLM moves it between `waiting` and `running` itself; with a connector "
        "this breaks if one request is reported as finished (get_finished) while it also runs, or if its client id is "
        "used twice at once.",
        now="a request id of its own for each request (no X-Request-Id that repeats); --no-async-scheduling; restart",
        good=_LOCAL,
    ),
    Problem(
        code="KVD295",
        name="resumed-request-is-still-in-the-batch",
        severity=Severity.CRASH,
        title="A worker gets a resumed request that it never took out of its batch.",
        shows=(
            Failed(
                kind="AssertionError",
                within="gpu_model_runner.py:_update_states",
                source="assert req_index is None",
                at=_RUNNER,
            ),
            Failed(
                kind="AssertionError",
                within="gpu_model_runner.py:_update_states",
                source="assert new_block_ids is not None",
                at=_RUNNER,
            ),
        ),
        sure=False,
        cause="A request that was preempted comes back as resumed, with all its blocks anew. Scheduler and worker "
        "disagree: it was preempted and resumed between two steps that this worker saw (asynchronous scheduling, "
        "pipeline parallelism), so that it was never unscheduled here.",
        now="--no-async-scheduling, --pipeline-parallel-size 1; restart. Fewer preemptions: smaller --max-num-seqs",
        good=_LOCAL,
    ),
    Problem(
        code="KVD296",
        name="worker-does-not-know-the-request",
        severity=Severity.CRASH,
        title="A worker gets a step of a request that it does not hold.",
        shows=(
            Failed(
                kind="KeyError",
                within="gpu_model_runner.py:_update_states",
                source="req_state = self.requests[req_id]",
                at=_RUNNER,
            ),
        ),
        sure=False,
        cause="The scheduler sends a request whole only once; after that a worker is expected to have it. It was "
        "dropped there as finished, or its first step never reached this worker: a client id that is used twice at "
        "once (the first end drops both), or a step of which a rank had died. The line before it in this worker "
        "decides.",
        now="a request id of its own for each request (no X-Request-Id that repeats); restart",
        good=_LOCAL,
    ),
    Problem(
        code="KVD298",
        name="step-without-connector-metadata",
        severity=Severity.CRASH,
        title="A worker has a KV connector, and the step that it got has no metadata for it.",
        shows=(
            Failed(
                kind="AssertionError",
                within="kv_connector_model_runner_mixin.py:_get_kv_connector_output",
                source="assert scheduler_output.kv_connector_metadata is not None",
                at="vllm/v1/worker/kv_connector_model_runner_mixin.py",
            ),
            Failed(
                kind="AssertionError",
                within="kv_connector.py:pre_forward",
                source="assert kv_connector_metadata is not None",
            ),
            Failed(
                kind="AssertionError",
                within="gpu_model_runner.py:execute_model",
                source="assert kv_connector_metadata is not None",
            ),
            Failed(kind="AssertionError", within="kv_connector_no_forward", source="kv_connector_metadata is not None"),
        ),
        sure=False,
        cause="vLLM's scheduler adds the metadata to each step if it made a connector too. Here it has none, or its "
        "build_connector_meta answered None: a scheduler class of its own (--scheduler-cls), a plugin that replaces "
        "the scheduler, or a connector whose build_connector_meta returns nothing for an empty step.",
        now='without --scheduler-cls and without plugins (VLLM_PLUGINS=""); a connector of your own: return an empty '
        "metadata object in each step, never None",
        good="a scheduler that calls the connector's build_connector_meta in every step, as vLLM's own does",
    ),
    Problem(
        code="KVD299",
        name="last-step-died-before-its-sample",
        general=True,
        severity=Severity.CRASH,
        title="The step before this one failed in the worker, and its state was left behind.",
        shows=(Failed(kind="RuntimeError", text="State error: sample_tokens() must be called after execute_model()"),),
        sure=False,
        cause="execute_model went well and sample_tokens was never called or failed: what ended that step is the "
        "cause, not this line. It stands above, mostly in another rank's lines, as an exception of a hook "
        "(wait_for_save, get_finished), of a sampler or of the device.",
        now="look at the first exception of any rank before this line: kvfix-diagnose ALL-LOGS, with those of every "
        "rank",
        good="what that exception asks for",
    ),
    Problem(
        code="KVD349",
        name="loaded-end-is-no-block-end",
        severity=Severity.CRASH,
        title="The connector's hit ends within a block of one of the model's KV groups.",
        shows=(
            Failed(
                kind="AssertionError",
                within="kv_cache_manager.py:truncate_computed_blocks",
                source="assert num_computed_tokens % manager.block_size == 0",
            ),
        ),
        releases={"vllm": ">=0.32"},
        sure=False,
        cause="vLLM cuts its own hit to the token where the connector's ends, in every KV group: that token has to be "
        "a multiple of each group's block size, and the own hit has to reach it. A hybrid model's groups have "
        "different sizes, and this connector answers in units of one of them.",
        now="--no-enable-prefix-caching, so that there is no own hit to cut; or --disable-hybrid-kv-cache-manager, "
        "where the model allows one group",
        good=_LOCAL,
    ),
    Problem(
        code="KVD364",
        name="engine-front-end-not-heard",
        general=True,
        severity=Severity.CRASH,
        title="An EngineCore heard nothing of its front-end in time.",
        shows=(
            Failed(kind="RuntimeError", text="Did not receive response from front-end process within"),
            Failed(kind="RuntimeError", text="Input socket thread died during startup"),
        ),
        cause="EngineCore connects to the API server's handshake port and waits for its answer. On other nodes "
        "(--headless, data parallelism) the address or port is wrong, a firewall drops it, or the API server ended "
        "before.",
        now="--data-parallel-address and --data-parallel-rpc-port must be the head node's, and reachable: `nc -vz "
        "HOST PORT` from this node; look at the API server's log for an earlier end",
        good="the same address, port and release of vLLM on every node",
        sure=False,
    ),
    Problem(
        code="KVD1725",
        name="prompt-logprobs-of-loaded-tokens",
        severity=Severity.CRASH,
        title="A request asked for prompt_logprobs of a prompt whose KV was loaded: they were never computed.",
        shows=(Failed(kind="OverflowError", text="out of range integral type conversion attempted", through="vllm/"),),
        releases={"vllm": "<0.32"},
        sure=False,
        cause="With prompt_logprobs vLLM skips its own prefix cache, but not the connector's: for tokens that came "
        "from there it returns memory that was not filled, as token ids of any number. Mostly that is nonsense; a "
        "negative one kills the API server's output handler. Without prompt_logprobs: wrong ids from the model, look "
        "at its output.",
        now="no `prompt_logprobs`, and no `echo` with `logprobs` (lm-eval's loglikelihood tasks), in requests to an "
        "engine with a connector, decode above all; take these from prefill or an engine without a connector",
        fixed={"vllm": "0.32.0"},
        threads=(
            "https://github.com/vllm-project/vllm/issues/50792",
            "https://github.com/vllm-project/vllm-ascend/issues/13363",
        ),
    ),
)
