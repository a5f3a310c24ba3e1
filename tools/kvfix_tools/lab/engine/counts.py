"""The counters of a run. If the counters of loads and stores with a feature are 0, the run did not test the feature."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from kvfix_tools.lab.options import Options

#: {feature: function that checks if the options have the feature}. A feature changes how KV is counted or moved.
FEATURES: dict[str, Callable[[Options], Any]] = {
    "drafts": lambda options: options.drafter,
    "drafts_of_ngram": lambda options: options.drafter == "ngram",
    "drafts_of_eagle": lambda options: options.drafter == "eagle",
    "drafts_of_mtp": lambda options: options.drafter == "mtp",
    "report_before_save": lambda options: options.save_last,
    "step_ahead": lambda options: options.async_scheduling,
    "runner_v2": lambda options: options.model_runner_v2,
    "priority": lambda options: options.policy == "priority",
    "one_window": lambda options: len(options.windows) == 1,
    "two_windows": lambda options: len(options.windows) > 1,
    "larger_blocks": lambda options: options.windows and options.window_blocks > 1,
    "states": lambda options: options.states,
    "states_and_drafts": lambda options: options.states and options.drafter,
    "one_object": lambda options: options.several_groups and not options.separate_object_groups,
    "separate_objects": lambda options: options.several_groups and options.separate_object_groups,
    "layers": lambda options: options.lmcache.get("use_layerwise"),
    "fetch_ahead": lambda options: options.lmcache.get("enable_async_loading"),
    "multi_connector": lambda options: options.beside or options.offloading,
    "tensor_ranks": lambda options: options.ranks > 1 and not (options.pipeline or options.context),
    "late_rank": lambda options: options.ranks > 1 and options.rank_delay,
    "more_ranks": lambda options: options.ranks > options.peer_ranks > 0,
    "fewer_ranks": lambda options: options.ranks < options.peer_ranks,
    "copied_heads": lambda options: max(options.ranks, options.peer_ranks) > options.kv_heads > 1,
    "pipeline": lambda options: options.pipeline,
    "context": lambda options: options.context,
}
#: The counters. Some need an explanation:
#: - full_steps: steps without a free block. busy_steps: steps with a transfer or a lookup in flight
#: - ranks_apart: transfers that only some ranks have reported. ranks_differ: lookups whose results differ by rank
#: - steps_ahead: steps scheduled while an earlier step has no output
#: - steps_in_flight: steps scheduled while two earlier steps have no output
#: - null_objects_left_out: objects that the server did not store because all their blocks are null
#: - last_blocks_dropped: hits of vLLM's prefix cache whose last block vLLM drops because of EAGLE
#: - not_to_store: requests that must not be stored
#: - passed_over: hits of LMCache that a MultiConnector does not use, because the hit of another connector is used
#: - came_first_by_priority: requests admitted before a request that arrived earlier
#: - aborted_storing: requests aborted during a store. The in-process connector ends each store in one step, so always 0
COUNTED = (
    "preemptions", "loaded_tokens", "stored_tokens", "finished", "full_steps", "aborted", "aborted_waiting",
    "aborted_running", "aborted_preempted", "aborted_looking", "aborted_loading", "aborted_storing", "ids_used_again",
    "resets", "resets_while_running", "evicted", "evicted_pinned", "loads_failed", "loads_partial",
    "lookups_unanswered", "busy_steps", "loaded_beside", "connector_resets", "loads_of_groups", "stores_of_groups",
    "loads_of_groups_failed", "null_objects_left_out", "ranks_apart", "ranks_differ", "failed_on_one_rank",
    "steps_ahead", "steps_in_flight", "server_stops", "server_restarts", "evicted_by_server", "read_from_disk",
    "drafts_proposed", "drafts_accepted", "drafts_rejected", "no_draft_accepted", "all_drafts_accepted",
    "last_blocks_dropped", "inputs", "locked_out_by_session", "pauses", "came_first_by_priority",
    "looked_for_standstill", "loads_of_kv_both", "loads_of_kv_producer", "loads_of_kv_consumer", "stores_of_kv_both",
    "stores_of_kv_producer", "stores_of_kv_consumer", "stores_for_decoder", "not_to_store", "passed_over",
    "loads_offloaded", "stores_offloaded",
    *(f"steps_with_{drafts}_drafts" for drafts in range(1, 8)),
    *(f"{what}_with_{feature}" for feature in FEATURES for what in ("loads", "stores")),
)  # fmt: skip


class Counts(Counter[str]):
    def __init__(self, options: Options) -> None:
        super().__init__(dict.fromkeys(COUNTED, 0))
        features = [name for name, has in FEATURES.items() if has(options)]
        self._loads = (f"loads_of_{options.kv_role}", *(f"loads_with_{each}" for each in features))
        self._stores = (f"stores_of_{options.kv_role}", *(f"stores_with_{each}" for each in features))

    def loaded(self, tokens: int) -> None:
        """Count a load that has ended in all ranks."""
        self["loaded_tokens"] += tokens
        for name in self._loads if tokens else self._loads[:1]:
            self[name] += 1

    def stored(self, tokens: int) -> None:
        self["stored_tokens"] += tokens
        for name in self._stores:
            self[name] += 1
