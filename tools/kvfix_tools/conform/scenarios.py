"""The scenarios that test the rules of the contract (contract.md), and the lab's stand-ins for parts of connectors.

In a schedule, `store(name, prompt)` runs a request to completion, and then empties vLLM's own prefix cache. A stand-in
replaces a part of a connector that needs a GPU, a server or a library.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.options import CONNECTORS, OF_VLLM, PAIRS
from kvfix_tools.lab.steps import Step, continued, prompt

#: {counter: why the scenario tested nothing if this counter is 0}
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
#: {requirement of a scenario: message if the connector, or the connector's stand-in, does not meet the requirement}
NEEDS = {
    "alone": "the scenario is for one engine. Only the fuzzer tests a connector that needs two engines",
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
    schedule: Sequence[Step]  # calls of methods of `Player`, of the lab's engine or of the engine's connector
    proof: tuple[str, ...] = ("loaded_tokens",)  # counters (counts.py). If one is 0, the scenario tested nothing
    needs: tuple[str, ...] = ()  # keys of NEEDS
    options: dict[str, Any] = {}  # options of the lab's engine that differ from the defaults


_LONG = "cmpl-" + "é/..% \u4e2d" * 40
_STORED = do.store("a", prompt(160))
_AGAIN = [do.admit("z", prompt(160), 3), do.run()]
_FAILED: dict[str, Any] = {"needs": ("lose",), "proof": ("loads_failed",)}
#: kv_transfer_params that a client may send. A connector may refuse these parameters, but the engine must not die.
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
    # These scenarios test stores, lookups, allocations and loads without failures.
    Scenario("whole-prompt", "granted", "The whole prompt is a hit, and the prompt fills its last block.",
        [do.store("a", prompt(64)), do.admit("b", prompt(64), 4), do.run()]),
    Scenario("part-of-a-prompt", "granted", "A prompt has a hit for its first half.",
        [do.store("a", prompt(64)), do.admit("b", prompt(64) + prompt(70, 1), 4), do.run()]),
    Scenario("on-top-of-computed", "granted", "vLLM has the first blocks of a hit.",
        [do.store("a", prompt(96)), do.admit("b", prompt(33), 1), do.run(), do.admit("c", prompt(97), 4), do.run()]),
    Scenario("all-is-computed", "granted", "vLLM has all tokens of a hit.",
        [do.store("a", prompt(64)), do.admit("b", prompt(64), 1), do.run(), do.admit("c", prompt(64), 4), do.run()]),
    Scenario("shared-prefix", "granted", "Several requests that share a prefix come at once.",
        [do.store("a", prompt(64)), do.admit("b", prompt(64) + [1] * 20, 4), do.admit("c", prompt(64) + [2] * 20, 4),
         do.admit("d", prompt(64), 4), do.run()]),
    Scenario("without-prefix-caching", "granted", "vLLM's own prefix cache is off.",
        [do.store("a", prompt(64)), do.admit("b", prompt(64), 4), do.admit("c", prompt(70), 4), do.run()],
        needs=("uncached",), options={"prefix_caching": False}),
    Scenario("other-lengths", "granted", "Prompts have one token, about one block, or about two blocks.",
        [do.store("a", prompt(33)),
         *(do.admit(f"r{tokens}", prompt(tokens), 3) for tokens in (1, 15, 16, 17, 31, 32, 33)), do.run()]),
    Scenario("hit-then-chunks", "granted", "The tokens after a hit are computed in several steps.",
        [do.store("a", prompt(64)), do.admit("b", prompt(64) + prompt(150, 2), 4), do.run()],
        options={"max_num_batched_tokens": 32}),
    Scenario("nothing-granted", "granted", "vLLM takes no tokens of a hit, because of prompt_logprobs.",
        [do.store("a", prompt(64)), do.admit("b", prompt(64), 4, sampling={"prompt_logprobs": 1}), do.run(),
         do.admit("c", prompt(65), 2), do.run()], proof=("finished",)),
    Scenario("another-one-loads", "granted", "Another connector of a MultiConnector loads the hit.",
        [do.admit("b", prompt(64), 4, in_other=True), do.run(), do.admit("c", prompt(64, 3), 2), do.run()],
        proof=("loaded_beside",), needs=("multi",), options={"beside": True}),
    Scenario("asked-until-there-is-room", "asked-again", "vLLM repeats a lookup in many steps, until blocks are free.",
        [do.store("a", prompt(64)), do.keep_blocks(2), do.admit("b", prompt(64), 4), do.step(6), do.free_blocks(),
         do.run()]),
    Scenario("prefill-in-chunks", "stored", "A prompt is computed in several steps, and then loaded.",
        [do.store("a", prompt(300)), do.admit("b", prompt(300), 4), do.run()], options={"max_num_batched_tokens": 40}),
    Scenario("two-prompts-at-once", "stored", "Each step computes a part of one prompt or of two prompts.",
        [do.admit("a", prompt(150), 20), do.admit("b", prompt(150, 1), 20), do.store("c", prompt(90, 2)),
         do.admit("d", prompt(150), 2), do.admit("e", prompt(150, 1), 2), do.admit("f", prompt(90, 2), 2), do.run()],
        options={"max_num_batched_tokens": 48}),
    Scenario("next-turn", "stored", "The next turn of a conversation has the last answer in its prompt.",
        [do.store("a", prompt(40), 50), do.admit("b", continued(prompt(40), 48) + [5] * 30, 4), do.run()]),
    Scenario("almost-the-same", "stored", "A prompt differs in one token of the second block.",
        [do.store("a", prompt(64)), do.admit("b", [*prompt(20), 9, *prompt(64)[21:]], 4), do.run()]),
    Scenario("adapters-and-salts", "stored", "Requests have the same prompt with a LoRA adapter, a salt, or neither.",
        [do.store("a", prompt(64)), do.store("b", prompt(64), lora="x"), do.store("c", prompt(64), cache_salt="s"),
         do.admit("d", prompt(64), 3), do.admit("e", prompt(64), 3, lora="x"), do.admit("f", prompt(64), 3, lora="yy"),
         do.admit("g", prompt(64), 3, cache_salt="s"), do.admit("h", prompt(64), 3, cache_salt="t"), do.run()]),
    Scenario("a-new-engine", "restart", "The engine ends, and a new engine gets the same prompt.",
        [do.store("a", prompt(64)), do.restart(), do.admit("b", prompt(64), 4), do.run()],
        needs=("restart",)),
    # These scenarios test request ids, finished and aborted requests, and preemptions.
    Scenario("odd-ids", "ends", "Request ids are long, and contain slashes, dots, blanks and other scripts.",
        [do.store(_LONG, prompt(64)), do.admit(_LONG + "b", prompt(64), 4), do.admit("../../x", prompt(70), 4),
         do.run()]),
    Scenario("id-used-again", "keeps-nothing", "A request id is used again (VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1).",
        [do.store("a", prompt(64)), do.store("a", prompt(96, 1)), do.admit("a", prompt(64), 3), do.run(),
         do.admit("a", prompt(96, 1), 3), do.run()], proof=("loaded_tokens", "ids_used_again")),
    Scenario("finished-twice", "keeps-nothing", "A request is aborted after it has ended.",
        [do.store("a", prompt(64)), do.admit("b", prompt(64), 2), do.run(), do.abort("b"), do.step(3), *_AGAIN],
        proof=("finished",)),
    Scenario("aborted-before-it-is-asked", "aborted", "A request is aborted before its first lookup.",
        [_STORED, do.admit("b", prompt(160), 4), do.abort("b"), do.step(2), *_AGAIN], proof=("aborted_waiting",)),
    Scenario("aborted-before-the-answer", "aborted", "A request is aborted while its lookup runs.",
        [_STORED, do.admit("b", prompt(160), 4), do.step(), do.abort("b"), do.step(4), *_AGAIN],
        proof=("aborted_looking",)),
    Scenario("aborted-after-the-promise", "aborted", "A request is aborted after the promise, before it has blocks.",
        [_STORED, do.keep_blocks(2), do.admit("b", prompt(160), 4), do.step(3), do.abort("b"), do.free_blocks(),
         do.step(4), *_AGAIN], proof=("aborted_waiting", "loaded_tokens")),
    Scenario("aborted-while-loading", "aborted", "A request is aborted while its load runs.",
        [_STORED, do.admit("b", prompt(160), 4), do.until_loading("b"), do.abort("b"), do.step(6), *_AGAIN],
        proof=("aborted_loading",)),
    Scenario("load-ends-after-the-abort", "blocks-in-use", "All other blocks are used while an aborted load continues.",
        [_STORED, do.admit("b", prompt(160), 4), do.until_loading("b"), do.abort("b"), do.admit("c", prompt(250, 1), 8),
         do.admit("d", prompt(250, 2), 8), do.admit("e", prompt(250, 3), 8), do.run(), *_AGAIN],
        proof=("aborted_loading",)),
    Scenario("aborted-after-the-load", "aborted", "A request is aborted while it computes on top of its load.",
        [_STORED, do.admit("b", prompt(160), 20), do.until_running("b"), do.abort("b"), do.step(2), *_AGAIN],
        proof=("aborted_running", "loaded_tokens")),
    Scenario("aborted-in-prefill", "aborted", "A request is aborted after a part of its prompt is stored.",
        [do.admit("b", prompt(160), 4), do.step(2), do.abort("b"), do.take_blocks(40), do.step(2), do.free_blocks(),
         *_AGAIN, do.store("c", prompt(160)), do.admit("d", prompt(160), 3), do.run()],
        options={"max_num_batched_tokens": 40}, proof=("aborted_running",)),
    Scenario("aborted-with-others", "aborted", "Two of three requests that share a hit are aborted.",
        [_STORED, *(do.admit(name, prompt(160), 8) for name in "bcd"), do.step(), do.abort("b"), do.step(),
         do.abort("c"), do.run(), *_AGAIN], proof=("aborted",)),
    Scenario("blocks-taken-at-the-end", "blocks-in-use", "Other requests write to all free blocks when a request ends.",
        [do.admit("a", prompt(160), 1), do.step(2), do.take_blocks(60), do.step(3), do.free_blocks(),
         do.store("b", prompt(16, 1)), *_AGAIN]),
    Scenario("blocks-taken-at-the-abort", "blocks-in-use", "Other requests write to all free blocks after an abort.",
        [do.admit("a", prompt(160), 9), do.step(2), do.abort("a"), do.take_blocks(60), do.step(3), do.free_blocks(),
         do.store("b", prompt(16, 1)), *_AGAIN], options={"max_num_batched_tokens": 200}),
    Scenario("preempted-in-decode", "preempted", "A request is preempted, loses its blocks to others, and resumes.",
        [do.admit("a", prompt(100), 40), do.step(20), do.preempt("a"), do.take_blocks(64), do.step(), do.free_blocks(),
         do.run(), do.store("b", prompt(16, 1)), do.admit("y", continued(prompt(100), 38), 3), do.run()],
        proof=("preemptions",)),
    Scenario("preempted-in-prefill", "preempted", "A request is preempted after half of its prompt is computed.",
        [do.admit("a", prompt(160), 3), do.step(2), do.preempt("a"), do.take_blocks(64), do.step(), do.free_blocks(),
         do.run(), do.store("b", prompt(16, 1)), *_AGAIN],
        options={"max_num_batched_tokens": 48}, proof=("preemptions",)),
    Scenario("preempted-after-the-load", "preempted", "A request is preempted right after its load.",
        [_STORED, do.admit("b", prompt(160) + [4] * 20, 30), do.until_running("b"), do.preempt("b"), do.take_blocks(64),
         do.step(), do.free_blocks(), do.run()], proof=("preemptions", "loaded_tokens")),
    Scenario("preempted-for-blocks", "preempted", "Requests are preempted because there are too few blocks for all.",
        [do.store("s", prompt(48)), *(do.admit(f"r{number}", prompt(48) + [number] * 16, 60) for number in range(6)),
         do.run(), do.admit("y", prompt(48) + [2] * 16, 3), do.run()],
        options={"num_blocks": 22}, proof=("preemptions", "loaded_tokens")),
    # These scenarios test failed loads, resets, client parameters, and modes of the engine.
    Scenario("failed-load", "failed-load", "Promised chunks are lost before the load, and vLLM computes them.",
        [_STORED, do.lose_stored(), do.admit("b", prompt(160), 4), do.run(), do.admit("c", prompt(160), 4),
         do.run()], **_FAILED),
    Scenario("failed-load-ends-it", "failed-load", "A failed load ends the request (kv_load_failure_policy fail).",
        [_STORED, do.lose_stored(), do.admit("b", prompt(160), 4), do.run(), do.admit("c", prompt(96, 1), 4), do.run(),
         do.expect_unharmed("c")], options={"kv_load_failure_policy": "fail"}, **_FAILED),
    Scenario("failed-load-of-two", "failed-load", "Two requests load the same chunks, and both loads fail.",
        [_STORED, do.lose_stored(), do.admit("b", prompt(160), 4), do.admit("c", prompt(160) + [2] * 9, 4), do.run()],
        **_FAILED),
    Scenario("failed-load-is-not-stored", "failed-load", "A request loads KV that was stored after a failed load.",
        [_STORED, do.lose_stored(), do.admit("b", prompt(160) + prompt(64, 1), 4), do.run(),
         do.store("c", prompt(16, 2)), do.admit("d", prompt(160) + prompt(64, 1), 4), do.run()], **_FAILED),
    Scenario("lost-after-the-promise", "failed-load", "Promised chunks are lost while the request waits for blocks.",
        [_STORED, do.keep_blocks(2), do.admit("b", prompt(160), 4), do.step(3), do.lose_stored(), do.free_blocks(),
         do.run()], needs=("lose",), proof=("finished",)),
    Scenario("reset-of-the-connector", "reset", "The weights change, and the same prompt is requested again.",
        [_STORED, do.new_weights(), do.admit("b", prompt(160), 4), do.run(), do.store("c", prompt(16, 1)),
         do.admit("d", prompt(160), 4), do.run()], proof=("connector_resets",)),
    Scenario("reset-while-it-runs", "reset", "The weights change while a request computes.",
        [_STORED, do.admit("b", prompt(100, 1), 30), do.step(6), do.new_weights(), do.run(),
         do.store("c", prompt(16, 2)), do.admit("d", prompt(100, 1), 3), do.run()], proof=("connector_resets",)),
    Scenario("client-parameters", "parameters", "Clients send requests with valid and invalid kv_transfer_params.",
        [_STORED,
         *(do.admit(f"r{number}", prompt(40 + number), 2, sampling={"extra_args": {"kv_transfer_params": each}})
           for number, each in enumerate(_PARAMETERS)), do.step(20),
         *(do.abort(f"r{number}") for number in range(len(_PARAMETERS))), do.run()], proof=("finished",)),
    Scenario("empty-steps", "ends", "The engine makes steps without a request, before a request and between requests.",
        [do.step(3), _STORED, do.step(3), do.admit("b", prompt(160), 4), do.run(), do.step(5),
         do.admit("c", prompt(170), 4), do.run()]),
    Scenario("pause", "ends", "Scheduling is paused while a request waits for its load.",
        [_STORED, do.admit("b", prompt(160), 4), do.step(), do.pause(), do.step(4), do.unpause(), do.run()]),
    Scenario("session", "stored", "A request gets more input after its answer.",
        [do.admit("a", prompt(40), 5, resumable=True), do.run(), do.add_input("a", prompt(50, 1), 5), do.run(),
         do.end_input("a"), do.run(), do.store("b", prompt(16, 2)),
         do.admit("c", continued(prompt(40), 4) + prompt(50, 1), 3), do.run()]),
    Scenario("ahead", "ahead", "Each step is scheduled before the previous step has an output.",
        [_STORED, do.admit("b", prompt(160), 20), do.admit("c", prompt(100, 1), 40), do.run(),
         do.store("d", prompt(16, 2)), do.admit("e", prompt(100, 1), 3), do.run()], options={"async_scheduling": True}),
    Scenario("aborted-ahead", "ahead", "A request is aborted while a step with it is in flight.",
        [_STORED, do.admit("b", prompt(160), 20), do.step(), do.abort("b"), do.admit("c", prompt(200, 1), 20),
         do.step(3), do.abort("c"), do.take_blocks(30), do.step(2), do.free_blocks(), do.store("d", prompt(16, 2)),
         do.admit("e", prompt(200, 1), 3), do.admit("f", prompt(160), 3), do.run()],
        options={"async_scheduling": True, "max_num_batched_tokens": 64}),
    Scenario("preempted-ahead", "ahead", "A request is preempted while a step with it is in flight.",
        [do.admit("b", prompt(100), 40), do.step(12), do.preempt("b"), do.take_blocks(64), do.step(), do.free_blocks(),
         do.run(), do.store("d", prompt(16, 2)), do.admit("e", continued(prompt(100), 38), 3), do.run()],
        options={"async_scheduling": True}),
    Scenario("drafts", "drafts", "Some drafts are rejected, and the next turn loads the answer.",
        [do.store("a", prompt(40), 80), do.admit("b", continued(prompt(40), 76) + [5] * 20, 8), do.run()],
        options=_DRAFTS, proof=("drafts_rejected", "loaded_tokens")),
    Scenario("drafts-ahead", "drafts", "Some drafts are rejected with asynchronous scheduling.",
        [do.store("a", prompt(40), 80), do.admit("b", continued(prompt(40), 76) + [5] * 20, 8), do.run()],
        options={**_DRAFTS, "drafter": "eagle", "async_scheduling": True},
        proof=("drafts_rejected", "loaded_tokens")),
    Scenario("sliding-window", "groups", "The model has full attention and a sliding window in separate KV groups.",
        [_STORED, do.admit("b", prompt(160) + [1] * 20, 30), do.run(), do.store("c", prompt(16, 1)),
         do.admit("d", prompt(160), 4), do.run()], needs=("groups",), options={"windows": (48,), "num_blocks": 96}),
    Scenario("sliding-window-preempted", "groups", "A request is preempted after its sliding window has moved.",
        [do.admit("a", prompt(160), 40), do.step(20), do.preempt("a"), do.take_blocks(96), do.step(), do.free_blocks(),
         do.run(), do.store("c", prompt(16, 1)), do.admit("d", prompt(160), 4), do.run()], needs=("groups",),
        options={"windows": (48,), "num_blocks": 96}),
)  # fmt: skip

_COPIES = "its copies between GPU and CPU memory are a stand-in"
_ENGINES = "there are two engines, and NIXL is a stand-in"


class Side(NamedTuple):
    connector: str  # the lab's option `connector`
    stand_in: str  # a sentence that names the replaced part, or "" if unknown
    offloading: str = ""  # the lab's option `offloading`

    @property
    def lacks(self) -> set[str]:
        """The keys of NEEDS that the stand-in does not meet."""
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
    """Return the stand-in, or None if the lab replaces no part. connector: the name in vLLM, or the name in the lab."""
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
