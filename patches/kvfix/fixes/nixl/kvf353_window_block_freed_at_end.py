"""Wrong text with a sliding window and NixlConnector: decode computes the last prompt token, but lacks a window block.

Symptom: No message is logged. The model has sliding windows (Gemma, gpt-oss). The first generated token is computed
with wrong KV for one token of the window. One prompt in N is affected, where N is the number of tokens in a block. If
the router lets the prefill engine generate more than one token, all prompts longer than the window are affected.

Cause: vLLM keeps the part of a window that the next token needs. After a prompt of P tokens, with a window of W, this
part begins at token P - W + 1. The decode engine loads P tokens and computes the last token again. The last token needs
the KV of token `P - W`. If a block begins at token P - W + 1, no engine has the block of `P - W`. Prefill frees this
block at the request's end (scheduler.py 0.32.0:3025), and decode allocates no block for token `P - W`
(single_type_kv_cache_manager.py 0.32.0:350). So decode reads the null block.

With Mamba states, bounded replay or MTP modules, prefill stops before the tokens that decode computes again
(`_prefill_backoff`, nixl/base_scheduler.py 0.32.0:379). With windows only, prefill computes the whole prompt.

Fix: If the model has windows, the fix makes prefill drop the prompt's last token. vLLM then also limits the prefill
request to one generated token.

Mixed roll-out: Install the fix on the prefill engine and on the decode engine, or on neither. If only one engine has
the fix, the two engines count tokens differently. If the last token has a block of its own, decode then reads all KV
shifted by one block (base_worker.py 0.32.0:3417). The result is wrong KV, without a message.
- Releases: vLLM 0.32.0 and 0.33.0. Earlier releases from 0.20.2 on have the bug too (code read, not tested), but not
  the function `_prefill_backoff`. 0.20.2 is the first release whose NixlConnector supports windows.
- Remove when: `_prefill_backoff` returns 1 for a model with windows.
"""

from kvfix.fixes.api import AT_START, NIXL_BASE_SCHEDULER, Any, Fix, fix_after, stubs


@fix_after(on_fault=lambda scheduler, tokens, *_, **__: max(tokens, 1))
def _prefill_backoff(scheduler: Any, tokens: int) -> int:
    return tokens or int(any(scheduler.blocks_per_sw))


def shows_bug(hook: Any, module: Any) -> bool:
    """Ask how many prompt tokens decode must compute if the model has a window. With the bug, the result is 0."""
    vllm_config = stubs.Stub(num_prefill_lookahead_tokens=0)
    scheduler = stubs.Stub(_has_mamba=False, _bounded_replay=False, blocks_per_sw=[0, 2], vllm_config=vllm_config)
    return bool(hook(scheduler) == 0)


FIX = Fix(
    NIXL_BASE_SCHEDULER._prefill_backoff(broken=">=0.32", probe=shows_bug, fix=_prefill_backoff),
    effect="wrong output",
    attaches=AT_START,
    scenarios=("nixl-window-freed-at-end", "nixl-window-freed-meanwhile"),
    opt_in=True,
)
