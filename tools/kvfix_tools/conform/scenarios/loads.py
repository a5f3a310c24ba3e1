"""What is stored, promised, granted and loaded, when nothing goes wrong.

`store(name, prompt)` is a request that is computed and ends; then vLLM forgets its own prefix cache.
"""

from kvfix_tools.conform.scenario import Scenario
from kvfix_tools.lab.steps import admit, continued, free_blocks, keep_blocks, prompt, restart, run, step, store

SCENARIOS = (
    Scenario("whole-prompt", "granted", "A prompt that ends with a block is hit whole.",
        [store("a", prompt(64)), admit("b", prompt(64), 4), run()]),
    Scenario("part-of-a-prompt", "granted", "The first half of a prompt is hit.",
        [store("a", prompt(64)), admit("b", prompt(64) + prompt(70, 1), 4), run()]),
    Scenario("on-top-of-computed", "granted", "vLLM has the first blocks of a hit.",
        [store("a", prompt(96)), admit("b", prompt(33), 1), run(), admit("c", prompt(97), 4), run()]),
    Scenario("all-is-computed", "granted", "vLLM has all that the connector has.",
        [store("a", prompt(64)), admit("b", prompt(64), 1), run(), admit("c", prompt(64), 4), run()]),
    Scenario("shared-prefix", "granted", "Several requests that share a prefix come at once.",
        [store("a", prompt(64)), admit("b", prompt(64) + [1] * 20, 4), admit("c", prompt(64) + [2] * 20, 4),
         admit("d", prompt(64), 4), run()]),
    Scenario("without-prefix-caching", "granted", "vLLM's own prefix cache is off.",
        [store("a", prompt(64)), admit("b", prompt(64), 4), admit("c", prompt(70), 4), run()],
        options={"prefix_caching": False}),
    Scenario("other-lengths", "granted", "Prompts of one token, around a block, and around two.",
        [store("a", prompt(33)),
         *(admit(f"r{tokens}", prompt(tokens), 3) for tokens in (1, 15, 16, 17, 31, 32, 33)), run()]),
    Scenario("hit-then-chunks", "granted", "What is not hit is computed in several steps.",
        [store("a", prompt(64)), admit("b", prompt(64) + prompt(150, 2), 4), run()],
        options={"max_num_batched_tokens": 32}),
    Scenario("nothing-granted", "granted", "A request for prompt_logprobs is asked for, and takes nothing.",
        [store("a", prompt(64)), admit("b", prompt(64), 4, sampling={"prompt_logprobs": 1}), run(),
         admit("c", prompt(65), 2), run()], proof=("finished",)),
    Scenario("another-one-loads", "granted", "In a MultiConnector the one before it loads; this one gets nothing.",
        [admit("b", prompt(64), 4, beside=True), run(), admit("c", prompt(64, 3), 2), run()],
        proof=("loaded_beside",), options={"beside": True}),
    Scenario("asked-until-there-is-room", "asked-again", "It is asked for in many steps, until it has blocks.",
        [store("a", prompt(64)), keep_blocks(2), admit("b", prompt(64), 4), step(6), free_blocks(), run()]),
    Scenario("prefill-in-chunks", "stored", "A prompt is computed in several steps, and then loaded.",
        [store("a", prompt(300)), admit("b", prompt(300), 4), run()], options={"max_num_batched_tokens": 40}),
    Scenario("two-prompts-at-once", "stored", "Two prompts are computed in the same steps, in turns.",
        [admit("a", prompt(150), 20), admit("b", prompt(150, 1), 20), store("c", prompt(90, 2)),
         admit("d", prompt(150), 2), admit("e", prompt(150, 1), 2), admit("f", prompt(90, 2), 2), run()],
        options={"max_num_batched_tokens": 48}),
    Scenario("next-turn", "stored", "The next turn of a conversation has the last answer in its prompt.",
        [store("a", prompt(40), 50), admit("b", continued(prompt(40), 48) + [5] * 30, 4), run()]),
    Scenario("almost-the-same", "stored", "A prompt differs in one token of the second block.",
        [store("a", prompt(64)), admit("b", [*prompt(20), 9, *prompt(64)[21:]], 4), run()]),
    Scenario("adapters-and-salts", "stored", "The same prompt with a LoRA adapter, with a salt, and with neither.",
        [store("a", prompt(64)), store("b", prompt(64), lora="x"), store("c", prompt(64), cache_salt="s"),
         admit("d", prompt(64), 3), admit("e", prompt(64), 3, lora="x"), admit("f", prompt(64), 3, lora="yy"),
         admit("g", prompt(64), 3, cache_salt="s"), admit("h", prompt(64), 3, cache_salt="t"), run()]),
    Scenario("a-new-engine", "restart", "The engine ends, and a new one is asked for the same prompt.",
        [store("a", prompt(64)), restart(), admit("b", prompt(64), 4), run()]),
)  # fmt: skip
