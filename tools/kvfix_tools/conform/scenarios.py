"""The scenarios of the contract, and the stand-ins with which `kvfix conform` plays some connectors.

`store(name, prompt)` runs a request to its end, and empties vLLM's own prefix cache.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvfix_tools.lab.options import CONNECTORS, OF_VLLM, PAIRS
from kvfix_tools.lab.steps import (
    Step,
    abort,
    add_input,
    admit,
    continued,
    end_input,
    expect_unharmed,
    free_blocks,
    keep_blocks,
    lose_stored,
    new_weights,
    pause,
    preempt,
    prompt,
    restart,
    run,
    step,
    store,
    take_blocks,
    unpause,
    until_loading,
    until_running,
)

#: {count: why a scenario has tested nothing if the count is 0}
WITHOUT = {
    "loaded_tokens": "nothing was loaded",
    "aborted_loading": "no load was in flight between steps",
    "aborted_looking": "every lookup was answered at once",
    "aborted_waiting": "no request was aborted while it waited",
    "aborted_running": "no request was aborted while it computed",
    "aborted": "no request was aborted",
    "loads_failed": "no load failed",
    "connector_resets": "nothing was reset",
    "preemptions": "no request was preempted",
    "drafts_rejected": "no draft was rejected",
    "loaded_beside": "the other connector loaded nothing",
    "finished": "no request has ended",
    "ids_used_again": "no request id was used again",
}
#: {requirement of a scenario: the message if the connector, or its stand-in, does not have it}
NEEDS = {
    "alone": "the scenario is for one engine, but this connector needs two: only the fuzzer tests it",
    "multi": "the stand-in for this connector cannot be used in a MultiConnector",
    "uncached": "the connector does nothing without vLLM's prefix caching",
    "restart": "the stand-in for this connector has no storage that outlives an engine",
    "lose": "give --lose MODULE:FUNCTION, which deletes the stored KV",
    "groups": "the connector does not have SupportsHMA, so vLLM gives it one KV group",
}


class Scenario(NamedTuple):
    name: str
    rule: str  # the rule of the contract that the scenario tests
    title: str
    schedule: Sequence[Step]  # methods of `Player`, of the lab's engine or of its connector
    proof: tuple[str, ...] = ("loaded_tokens",)  # counts (request_events.py). If a count is 0, the rule was not tested
    needs: tuple[str, ...] = ()  # keys of NEEDS
    options: dict[str, Any] = {}  # of the lab's engine, if they differ from their defaults


_LONG = "cmpl-" + "é/..% \u4e2d" * 40
_STORED = store("a", prompt(160))
_AGAIN = [admit("z", prompt(160), 3), run()]
_FAILED: dict[str, Any] = {"needs": ("lose",), "proof": ("loads_failed",)}
#: Parameters that a client may send. A connector may refuse them, but must not end the engine.
_PARAMETERS: tuple[dict[str, Any], ...] = (
    {},
    {"do_remote_prefill": True},
    {"do_remote_decode": "yes"},
    {"do_remote_prefill": None, "remote_host": 7, "remote_port": "x", "remote_engine_id": []},
    {"transfer_id": {"a": [1]}, "disagg_spec": "none", "ret_first_tok": 1},
    {"": None, "é" * 300: [[[]]]},
)
_DRAFTS = {"drafter": "ngram", "drafts": 3, "acceptance": 60}

SCENARIOS = (
    # Without a failure: stores, promises, grants and loads.
    Scenario("whole-prompt", "granted", "A prompt that ends with a block has a hit for all of it.",
        [store("a", prompt(64)), admit("b", prompt(64), 4), run()]),
    Scenario("part-of-a-prompt", "granted", "A prompt has a hit for its first half.",
        [store("a", prompt(64)), admit("b", prompt(64) + prompt(70, 1), 4), run()]),
    Scenario("on-top-of-computed", "granted", "vLLM has the first blocks of a hit.",
        [store("a", prompt(96)), admit("b", prompt(33), 1), run(), admit("c", prompt(97), 4), run()]),
    Scenario("all-is-computed", "granted", "vLLM has all tokens of a hit.",
        [store("a", prompt(64)), admit("b", prompt(64), 1), run(), admit("c", prompt(64), 4), run()]),
    Scenario("shared-prefix", "granted", "Several requests that share a prefix come at once.",
        [store("a", prompt(64)), admit("b", prompt(64) + [1] * 20, 4), admit("c", prompt(64) + [2] * 20, 4),
         admit("d", prompt(64), 4), run()]),
    Scenario("without-prefix-caching", "granted", "vLLM's own prefix cache is off.",
        [store("a", prompt(64)), admit("b", prompt(64), 4), admit("c", prompt(70), 4), run()],
        needs=("uncached",), options={"prefix_caching": False}),
    Scenario("other-lengths", "granted", "Prompts of one token, and of about one and two blocks.",
        [store("a", prompt(33)),
         *(admit(f"r{tokens}", prompt(tokens), 3) for tokens in (1, 15, 16, 17, 31, 32, 33)), run()]),
    Scenario("hit-then-chunks", "granted", "The tokens after a hit are computed in several steps.",
        [store("a", prompt(64)), admit("b", prompt(64) + prompt(150, 2), 4), run()],
        options={"max_num_batched_tokens": 32}),
    Scenario("nothing-granted", "granted", "vLLM takes no tokens of a hit, because of prompt_logprobs.",
        [store("a", prompt(64)), admit("b", prompt(64), 4, sampling={"prompt_logprobs": 1}), run(),
         admit("c", prompt(65), 2), run()], proof=("finished",)),
    Scenario("another-one-loads", "granted", "In a MultiConnector another connector loads, and this one gets nothing.",
        [admit("b", prompt(64), 4, in_other_connector=True), run(), admit("c", prompt(64, 3), 2), run()],
        proof=("loaded_beside",), needs=("multi",), options={"beside": True}),
    Scenario("asked-until-there-is-room", "asked-again", "vLLM asks for a request in many steps, until it has blocks.",
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
    Scenario("a-new-engine", "restart", "The engine ends, and a new engine gets the same prompt.",
        [store("a", prompt(64)), restart(), admit("b", prompt(64), 4), run()],
        needs=("restart",)),
    # Request ids, ends, aborts and preemptions.
    Scenario("odd-ids", "ends", "Request ids are long, and contain slashes, dots, blanks and other scripts.",
        [store(_LONG, prompt(64)), admit(_LONG + "b", prompt(64), 4), admit("../../x", prompt(70), 4), run()]),
    Scenario("id-used-again", "keeps-nothing", "A request id is used again, because vLLM does not make ids unique.",
        [store("a", prompt(64)), store("a", prompt(96, 1)), admit("a", prompt(64), 3), run(),
         admit("a", prompt(96, 1), 3), run()], proof=("loaded_tokens", "ids_used_again")),
    Scenario("finished-twice", "keeps-nothing", "A request is aborted after it has ended.",
        [store("a", prompt(64)), admit("b", prompt(64), 2), run(), abort("b"), step(3), *_AGAIN],
        proof=("finished",)),
    Scenario("aborted-before-it-is-asked", "aborted", "A request is aborted before vLLM asks for it.",
        [_STORED, admit("b", prompt(160), 4), abort("b"), step(2), *_AGAIN], proof=("aborted_waiting",)),
    Scenario("aborted-before-the-answer", "aborted", "A request is aborted while its lookup runs.",
        [_STORED, admit("b", prompt(160), 4), step(), abort("b"), step(4), *_AGAIN], proof=("aborted_looking",)),
    Scenario("aborted-after-the-promise", "aborted", "A request is aborted after the promise, before it has blocks.",
        [_STORED, keep_blocks(2), admit("b", prompt(160), 4), step(3), abort("b"), free_blocks(), step(4), *_AGAIN],
        proof=("aborted_waiting", "loaded_tokens")),
    Scenario("aborted-while-loading", "aborted", "A request is aborted while its load runs.",
        [_STORED, admit("b", prompt(160), 4), until_loading("b"), abort("b"), step(6), *_AGAIN],
        proof=("aborted_loading",)),
    Scenario("load-ends-after-the-abort", "blocks-in-use", "All other blocks are used while an aborted load continues.",
        [_STORED, admit("b", prompt(160), 4), until_loading("b"), abort("b"), admit("c", prompt(250, 1), 8),
         admit("d", prompt(250, 2), 8), admit("e", prompt(250, 3), 8), run(), *_AGAIN], proof=("aborted_loading",)),
    Scenario("aborted-after-the-load", "aborted", "A request is aborted while it computes on top of its load.",
        [_STORED, admit("b", prompt(160), 20), until_running("b"), abort("b"), step(2), *_AGAIN],
        proof=("aborted_running", "loaded_tokens")),
    Scenario("aborted-in-prefill", "aborted", "A request is aborted after a part of its prompt is stored.",
        [admit("b", prompt(160), 4), step(2), abort("b"), take_blocks(40), step(2), free_blocks(), *_AGAIN,
         store("c", prompt(160)), admit("d", prompt(160), 3), run()],
        options={"max_num_batched_tokens": 40}, proof=("aborted_running",)),
    Scenario("aborted-with-others", "aborted", "Two of three requests that share a hit are aborted.",
        [_STORED, *(admit(name, prompt(160), 8) for name in "bcd"), step(), abort("b"), step(), abort("c"), run(),
         *_AGAIN], proof=("aborted",)),
    Scenario("blocks-taken-at-the-end", "blocks-in-use", "Other requests write to all free blocks after the end.",
        [admit("a", prompt(160), 1), step(2), take_blocks(60), step(3), free_blocks(), store("b", prompt(16, 1)),
         *_AGAIN]),
    Scenario("blocks-taken-at-the-abort", "blocks-in-use", "Other requests write to all free blocks after an abort.",
        [admit("a", prompt(160), 9), step(2), abort("a"), take_blocks(60), step(3), free_blocks(),
         store("b", prompt(16, 1)), *_AGAIN], options={"max_num_batched_tokens": 200}),
    Scenario("preempted-in-decode", "preempted", "A request is preempted, loses its blocks to others, and resumes.",
        [admit("a", prompt(100), 40), step(20), preempt("a"), take_blocks(64), step(), free_blocks(), run(),
         store("b", prompt(16, 1)), admit("y", continued(prompt(100), 38), 3), run()], proof=("preemptions",)),
    Scenario("preempted-in-prefill", "preempted", "A request is preempted after half of its prompt is computed.",
        [admit("a", prompt(160), 3), step(2), preempt("a"), take_blocks(64), step(), free_blocks(), run(),
         store("b", prompt(16, 1)), *_AGAIN], options={"max_num_batched_tokens": 48}, proof=("preemptions",)),
    Scenario("preempted-after-the-load", "preempted", "A request is preempted right after its load.",
        [_STORED, admit("b", prompt(160) + [4] * 20, 30), until_running("b"), preempt("b"), take_blocks(64), step(),
         free_blocks(), run()], proof=("preemptions", "loaded_tokens")),
    Scenario("preempted-for-blocks", "preempted", "Requests are preempted because there are too few blocks for all.",
        [store("s", prompt(48)), *(admit(f"r{number}", prompt(48) + [number] * 16, 60) for number in range(6)), run(),
         admit("y", prompt(48) + [2] * 16, 3), run()],
        options={"num_blocks": 22}, proof=("preemptions", "loaded_tokens")),
    # Failed loads, resets, client parameters, and modes of the engine.
    Scenario("failed-load", "failed-load", "Promised chunks are lost before the load, and vLLM computes them.",
        [_STORED, lose_stored(), admit("b", prompt(160), 4), run(), admit("c", prompt(160), 4), run()], **_FAILED),
    Scenario("failed-load-ends-it", "failed-load", "A failed load ends the request (kv_load_failure_policy fail).",
        [_STORED, lose_stored(), admit("b", prompt(160), 4), run(), admit("c", prompt(96, 1), 4), run(),
         expect_unharmed("c")], options={"kv_load_failure_policy": "fail"}, **_FAILED),
    Scenario("failed-load-of-two", "failed-load", "Two requests load the same chunks, and both loads fail.",
        [_STORED, lose_stored(), admit("b", prompt(160), 4), admit("c", prompt(160) + [2] * 9, 4), run()],
        **_FAILED),
    Scenario("failed-load-is-not-stored", "failed-load", "A request loads KV that was stored after a failed load.",
        [_STORED, lose_stored(), admit("b", prompt(160) + prompt(64, 1), 4), run(), store("c", prompt(16, 2)),
         admit("d", prompt(160) + prompt(64, 1), 4), run()], **_FAILED),
    Scenario("lost-after-the-promise", "failed-load", "Promised chunks are lost while the request waits for blocks.",
        [_STORED, keep_blocks(2), admit("b", prompt(160), 4), step(3), lose_stored(), free_blocks(), run()],
        needs=("lose",), proof=("finished",)),
    Scenario("reset-of-the-connector", "reset", "The weights change, and the same prompt is requested again.",
        [_STORED, new_weights(), admit("b", prompt(160), 4), run(), store("c", prompt(16, 1)),
         admit("d", prompt(160), 4), run()], proof=("connector_resets",)),
    Scenario("reset-while-it-runs", "reset", "The weights change while a request computes.",
        [_STORED, admit("b", prompt(100, 1), 30), step(6), new_weights(), run(), store("c", prompt(16, 2)),
         admit("d", prompt(100, 1), 3), run()], proof=("connector_resets",)),
    Scenario("client-parameters", "parameters", "Requests with kv_transfer_params of any kind.",
        [_STORED, *(admit(f"r{number}", prompt(40 + number), 2, sampling={"extra_args": {"kv_transfer_params": each}})
                    for number, each in enumerate(_PARAMETERS)), step(20),
         *(abort(f"r{number}") for number in range(len(_PARAMETERS))), run()], proof=("finished",)),
    Scenario("empty-steps", "ends", "Steps without a request, before, between and after.",
        [step(3), _STORED, step(3), admit("b", prompt(160), 4), run(), step(5), admit("c", prompt(170), 4), run()]),
    Scenario("pause", "ends", "Scheduling is paused while a request waits for its load.",
        [_STORED, admit("b", prompt(160), 4), step(), pause(), step(4), unpause(), run()]),
    Scenario("session", "stored", "A request gets more input after its answer.",
        [admit("a", prompt(40), 5, resumable=True), run(), add_input("a", prompt(50, 1), 5), run(), end_input("a"),
         run(), store("b", prompt(16, 2)), admit("c", continued(prompt(40), 4) + prompt(50, 1), 3), run()]),
    Scenario("ahead", "ahead", "Each step is scheduled before the answer to the last step.",
        [_STORED, admit("b", prompt(160), 20), admit("c", prompt(100, 1), 40), run(), store("d", prompt(16, 2)),
         admit("e", prompt(100, 1), 3), run()], options={"async_scheduling": True}),
    Scenario("aborted-ahead", "ahead", "A request is aborted while a step with it is in flight.",
        [_STORED, admit("b", prompt(160), 20), step(), abort("b"), admit("c", prompt(200, 1), 20), step(3), abort("c"),
         take_blocks(30), step(2), free_blocks(), store("d", prompt(16, 2)), admit("e", prompt(200, 1), 3),
         admit("f", prompt(160), 3), run()], options={"async_scheduling": True, "max_num_batched_tokens": 64}),
    Scenario("preempted-ahead", "ahead", "A request is preempted while a step with it is in flight.",
        [admit("b", prompt(100), 40), step(12), preempt("b"), take_blocks(64), step(), free_blocks(), run(),
         store("d", prompt(16, 2)), admit("e", continued(prompt(100), 38), 3), run()],
        options={"async_scheduling": True}),
    Scenario("drafts", "drafts", "Some drafts are rejected, and the next turn loads the answer.",
        [store("a", prompt(40), 80), admit("b", continued(prompt(40), 76) + [5] * 20, 8), run()],
        options=_DRAFTS, proof=("drafts_rejected", "loaded_tokens")),
    Scenario("drafts-ahead", "drafts", "Some drafts are rejected with asynchronous scheduling.",
        [store("a", prompt(40), 80), admit("b", continued(prompt(40), 76) + [5] * 20, 8), run()],
        options={**_DRAFTS, "drafter": "eagle", "async_scheduling": True},
        proof=("drafts_rejected", "loaded_tokens")),
    Scenario("sliding-window", "groups", "Full attention and a sliding window, each with its own blocks.",
        [_STORED, admit("b", prompt(160) + [1] * 20, 30), run(), store("c", prompt(16, 1)),
         admit("d", prompt(160), 4), run()], needs=("groups",), options={"windows": (48,), "num_blocks": 96}),
    Scenario("sliding-window-preempted", "groups", "A request is preempted after its sliding window has moved.",
        [admit("a", prompt(160), 40), step(20), preempt("a"), take_blocks(96), step(), free_blocks(), run(),
         store("c", prompt(16, 1)), admit("d", prompt(160), 4), run()], needs=("groups",),
        options={"windows": (48,), "num_blocks": 96}),
)  # fmt: skip

#: Stand-ins of the lab for vLLM's connectors whose workers need a GPU, a server or a library.
_COPIES = "its copies between GPU and CPU memory are a stand-in"
_ENGINES = "there are two engines, and NIXL is a stand-in"


class Side(NamedTuple):
    connector: str  # option of the lab
    stand_in: str  # the part that is a stand-in; "" if unknown
    offloading: str = ""  # option of the lab

    @property
    def lacks(self) -> set[str]:
        """The requirements (keys of NEEDS) that the stand-in does not meet."""
        has = {"groups"} if self.connector in ("mp", *OF_VLLM) and not self.offloading else set()
        has |= {"multi"} if self.connector in ("v1", "mp", "mp-in-tree") else set()
        has |= {"uncached"} if self.connector != "simple-offload" else set()
        has |= {"alone"} if self.connector not in PAIRS else set()
        return NEEDS.keys() - has


_SIDES = {
    "LMCacheConnectorV1": Side("v1", "its cache engine is a stand-in"),
    "LMCacheMPConnector": Side("mp", "its server is a stand-in"),
    "OffloadingConnector": Side("offloading", _COPIES),
    "SimpleCPUOffloadConnector": Side("simple-offload", _COPIES),
    "NixlConnector": Side("nixl-pull", _ENGINES),
    "NixlPullConnector": Side("nixl-pull", _ENGINES),
    "NixlPushConnector": Side("nixl-push", _ENGINES),
    "MooncakeConnector": Side("mooncake", "there are two engines, and Mooncake's transfer engine is a stand-in"),
}


def side(connector: str, config: dict[str, Any]) -> Side | None:
    """Return the stand-in for a connector, by its name in vLLM or the lab. None: the lab runs the connector itself."""
    if connector == "MultiConnector":
        names = [str(child.get("kv_connector")) for child in config.get("connectors", ())]
        lmcache = [_SIDES[name] for name in names if name.startswith("LMCache") and name in _SIDES]
        if len(names) != 2 or len(lmcache) != 1 or "OffloadingConnector" not in names:
            return None
        place = "first" if names[0] == "OffloadingConnector" else "last"
        return lmcache[0]._replace(stand_in=f"{lmcache[0].stand_in}, and so are the copies", offloading=place)
    if connector in CONNECTORS:
        return next((each for each in _SIDES.values() if each.connector == connector), Side(connector, ""))
    found = _SIDES.get(connector)
    return found if found is not None and found.connector in CONNECTORS else None
