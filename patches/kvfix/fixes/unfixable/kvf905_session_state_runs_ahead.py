"""A streaming session returns wrong text with Mamba or GDN layers: its state includes a token that vLLM dropped.

Symptom: Nothing is logged. A streaming session returns wrong text after its first turn. The model has state layers
(Mamba, GDN), and the engine uses asynchronous scheduling or speculative decoding. LMCache stores wrong states.

Cause: vLLM schedules the next token before it knows that a stop token or a stop string has ended the turn. With
pipeline parallelism, vLLM may also schedule a token beyond `max_tokens`. When the next input arrives, vLLM drops the
last token of the turn and continues without it (`_update_request_as_session`, scheduler.py 0.32.0:1650). Attention
layers overwrite the KV of the dropped token. A state cannot be rolled back, so it still includes the dropped token.

With speculative decoding, vLLM drops accepted draft tokens that come after the end of a turn
(`_update_request_with_output`, :2508), but the state still includes these tokens.

Workaround: For streaming input to models with state layers, use `--no-async-scheduling` and no speculative decoding.
- Releases: vLLM 0.32.0 and 0.33.0. Earlier releases were not tested with state layers. Tests show the bug with pipeline
  parallelism and with draft tokens. For a turn that ends at a stop token, only the source was read.
- Remove when: vLLM recomputes the state of a session from the last state that vLLM has kept.
"""

from kvfix.fixes.api import SCHEDULER, Fix

FIX = Fix(
    SCHEDULER._update_request_as_session(broken=">=0.32", fix=None),
    effect="wrong output",
    scenarios=("session-state-runs-ahead", "session-state-has-drafts"),
    no_patch={"vllm": "the scheduler cannot go back to an earlier state, and vLLM must decide which states it keeps"},
)
