"""MultiConnector: children whose KV groups, layouts or transfers do not go together."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_MULTI_CONNECTOR = f"{_V1}/multi_connector.py"

PROBLEMS = (
    Problem(
        code="KVD655",
        name="multi-connector-mixes-hma",
        severity=Severity.CRASH,
        title="A MultiConnector holds a connector that cannot handle several KV groups.",
        shows=(
            Failed(
                kind="AssertionError",
                text="HMA should not be enabled unless all sub-connectors support it",
                at=_MULTI_CONNECTOR,
            ),
            Failed(
                kind="AssertionError",
                text="HMA with multiple kv_cache_groups requires all sub-connectors to support HMA",
                at=_MULTI_CONNECTOR,
            ),
        ),
        releases={"vllm": ">=0.26"},
        cause="The hybrid KV cache manager was forced on, but one of the connectors has no support for it.",
        now="remove `--no-disable-hybrid-kv-cache-manager`; a model with Mamba or GDN layers needs connectors that all "
        "support it (not LMCacheConnectorV1)",
        good="the configuration",
    ),
    Problem(
        code="KVD656",
        name="multi-connector-layouts-differ",
        severity=Severity.CRASH,
        title="Connectors in a MultiConnector want different KV layouts.",
        shows=(
            Failed(
                kind="ValueError", text="KV cache layout mismatch: found <count> different layouts", at=_MULTI_CONNECTOR
            ),
        ),
        sentence="{count} layouts",
        releases={"vllm": ">=0.26"},
        cause="The GPU cache has one layout; NixlConnector wants HND, another one NHD or its own.",
        now="`export VLLM_KV_CACHE_LAYOUT=HND`, or one of the connectors alone",
        good="connectors of one layout",
    ),
)
