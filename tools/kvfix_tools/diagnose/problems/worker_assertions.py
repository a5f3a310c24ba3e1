"""Workers that die of an assertion of vLLM's: a failure counted twice, a pipeline rank that receives from itself."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_PULLS = "https://github.com/vllm-project/vllm/pull"

PROBLEMS = (
    Problem(
        code="KVD149",
        name="nixl-failure-counted-twice",
        severity=Severity.CRASH,
        title="NixlConnector ends one failed request twice, and the worker dies.",
        shows=(Failed(kind="AssertionError", text="<request> not found in recving_metadata list"),),
        sentence="request {request}",
        releases={"vllm": "<0.32"},
        cause="A request's KV is read with one transfer for each remote rank. If prefill goes away, these fail at "
        "different polls, and each failure ends the request: at the second its entry is gone, which the worker "
        "asserts. The lines `NIXL transfer failure` before it name the prefill engine.",
        now="restart this decode engine, after the prefill engine that went away; until the upgrade equal "
        "--tensor-parallel-size on both sides: then a request is one transfer",
        fixed={"vllm": "0.32.0"},
        threads=(f"{_PULLS}/54518",),
    ),
    Problem(
        code="KVD150",
        name="last-pipeline-rank-receives",
        severity=Severity.CRASH,
        title="With pipeline parallelism the last rank waits for tokens that it sends itself, and dies.",
        shows=(
            Failed(
                kind="AssertionError",
                source="assert not pp.is_last_rank",
                within="gpu_model_runner.py:_pp_receive_prev_sampled_token_ids_to_input_batch",
                at="vllm/v1/worker/gpu_model_runner.py",
            ),
        ),
        sentence="a step that only loaded or stored KV",
        releases={"vllm": ">=0.16,<0.26"},
        cause="In a step without tokens (a connector loads or stores, no request runs) each rank receives the sampled "
        "tokens of the last one, if --async-scheduling is on, and so does the last one. Without a connector there is "
        "hardly such a step.",
        now="`--no-async-scheduling`, restart; or `--pipeline-parallel-size 1`",
        fixed={"vllm": "0.26.0"},
        threads=("https://github.com/vllm-project/vllm/issues/41612", f"{_PULLS}/40749"),
    ),
)
