"""A load fails in one rank of a kv_producer, and the other one stores what the step computes on top of it.

The schedule of failed-load-of-one-rank. A request that names no decoder is stored for all, as with kv_both, but a
kv_producer stores it even if its metadata say that it is not to be saved (vllm_v1_adapter.py 0.5.6:1152).
"""

from dataclasses import replace

from kvfix_tools.lab.scenarios.failed_load_of_one_rank import SCENARIO as KV_BOTH

SCENARIO = replace(KV_BOTH, options=replace(KV_BOTH.options, kv_role="kv_producer"))
