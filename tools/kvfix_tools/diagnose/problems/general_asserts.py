"""Native code of a transport that stops itself: assertions of Mooncake."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Problem

PROBLEMS = (
    Problem(
        code="KVD1109",
        name="mooncake-asserts",
        general=True,
        severity=Severity.CRASH,
        title="Mooncake's native code found itself in a state that it holds for impossible, and ended the process.",
        shows=(
            Died("mooncake-store/<where>: Assertion `<what>' failed"),
            Died("mooncake-transfer-engine/<where>: Assertion `<what>' failed"),
        ),
        sure=False,
        cause="The assertion in the line says what: a segment, handle or size that it did not expect. Master and "
        "clients of two releases are the first thing to look at (each takes the other's structures as they are), "
        "then settings that the release does not know together (SSD offload, several cards).",
        now="pip show mooncake-transfer-engine on every node and of the master: one release; restart the master "
        "first, then all clients; without --enable-offload for a try",
        good="the newest mooncake-transfer-engine everywhere; its issues, searched for the assertion's words",
        threads=("https://github.com/kvcache-ai/Mooncake/issues/495",),
    ),
)
