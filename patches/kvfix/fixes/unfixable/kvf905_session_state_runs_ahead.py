"""A streaming session returns wrong text with Mamba or GDN layers: its state includes a token that vLLM dropped.

## Symptom
None. Wrong text in a session (streaming input) after its first turn, with a model that has layers of states, and
asynchronous scheduling or speculative decoding. The LMCache server stores the wrong states under valid keys.

## Cause
vLLM schedules the next token before it knows that the turn has ended: with pipeline parallelism beyond `max_tokens`,
else where a stop token or a stop string ends the turn. When input comes it drops the turn's last token and computes on
from there (`_update_request_as_session`, scheduler.py 0.32.0:1651). The KV of attention is overwritten. A state cannot
go back: it has the dropped token. The same comes of drafts: those accepted beyond the end of a turn are dropped
(`_update_request_with_output`, :2506), and the state has them.

## Workaround
`--no-async-scheduling` and no speculative decoding, for a model with Mamba or GDN layers whose clients send streaming
input.

## Releases
vLLM 0.32.0 and 0.33.0, the first ones played with states. With pipeline parallelism and with drafts shown in the lab; a
stop token was read in the source.

## Upstream
None known.

## Remove when
vLLM computes a session's state anew from the last one that it has kept.
"""

from __future__ import annotations

from kvfix.fixes import stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import SCHEDULER

FIX = Fix(
    __name__,
    __doc__,
    effect="wrong output",
    targets=(SCHEDULER._update_request_as_session(broken=">=0.32", probe=stubs.cannot_tell, fix=None),),
    scenarios=("session-state-runs-ahead", "session-state-has-drafts"),
    no_patch={"vllm": "the scheduler has no way to take a state back; where it keeps one is for vLLM to decide"},
)
