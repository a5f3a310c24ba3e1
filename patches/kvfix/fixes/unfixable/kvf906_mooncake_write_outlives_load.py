"""Wrong text after a failed load: MooncakeConnector's prefill writes into blocks that decode gave to another request.

Symptom: After loads that have failed, requests return wrong text with HTTP 200. The decode engine logs `pulling
kv_caches for [...] failed: transfer failed: Resource temporarily unavailable`. The prefill engine logs nothing.

Cause: The decode engine sends a message with its block ids to the prefill engine. If the load takes
longer than VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT plus 60 s, decode frees the blocks (mooncake_connector.py 0.32.0:2350).
The prefill engine's own timeout starts only when the prefill engine takes the message (:1588).

The prefill engine takes the message late if its process hangs, or if all of its 2 * num_workers tasks wait for prefills
(:1456). The prefill engine then writes after the decode engine has dropped the load, into blocks of another request.
The message carries no deadline, so a fix needs changes in both engines.

Workaround: Set VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT to a larger number of seconds on the decode engine than on the
prefill engine, for example 960 and 480. A message may then wait for 60 s plus the difference of the two timeouts. Set a
larger `num_workers` in the prefill engine's kv_connector_extra_config, so that messages wait less.
- Remove when: The prefill engine and the decode engine agree when a load ends.
"""

from kvfix.fixes.api import MOONCAKE_WORKER, Fix

FIX = Fix(
    MOONCAKE_WORKER.register_kv_caches(broken=">=0.32", fix=None),
    effect="wrong output",
    evidence={"LAB001": "", "LAB008": ""},
    scenarios=("mooncake-write-outlives-load",),
    no_patch={"vllm": "both engines must agree how long a write may take, so the connector's messages must change"},
)
