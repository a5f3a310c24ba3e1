"""A streaming session returns wrong text with Mamba or GDN layers: its state includes a token that vLLM dropped.

Symptom: Nothing is logged. A session (streaming input) returns wrong text after its first turn. The model has layers
with states (Mamba, GDN), and the engine uses asynchronous scheduling or speculative decoding. The LMCache server stores
the wrong states under valid keys.

Cause: vLLM schedules the next token before it knows that a stop token or a stop string has ended the turn. With
pipeline parallelism, vLLM may also schedule a token beyond `max_tokens`. When input comes, vLLM drops the last token of
the turn and continues without it (`_update_request_as_session`, scheduler.py 0.32.0:1651). The KV of attention is
overwritten. A state cannot go back: it includes the dropped token.

Drafts have the same effect. vLLM drops drafts that were accepted beyond the end of a turn
(`_update_request_with_output`, :2506), and the state includes them.

Workaround: For streaming input to these models, use `--no-async-scheduling` and no speculative decoding.
- Releases: vLLM 0.32.0 and 0.33.0. Earlier releases were not tested with states. Tests of kvfix show the bug with
  pipeline parallelism and with drafts. For the case of a stop token, only the source was read.
- Remove when: vLLM recomputes the state of a session from the last state that vLLM has kept.
"""

from kvfix.fixes.api import SCHEDULER, Fix

FIX = Fix(
    SCHEDULER._update_request_as_session(broken=">=0.32", fix=None),
    effect="wrong output",
    scenarios=("session-state-runs-ahead", "session-state-has-drafts"),
    no_patch={"vllm": "the scheduler cannot go back to an earlier state, and vLLM must decide which states it keeps"},
)
