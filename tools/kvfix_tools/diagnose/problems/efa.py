"""AWS EFA below NIXL and Mooncake: what libfabric's own provider says before it ends the process."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Problem

PROBLEMS = (
    Problem(
        code="KVD1144",
        name="efa-provider-aborts",
        severity=Severity.CRASH,
        title="libfabric's EFA provider met an error that its caller does not take from it, and ended the process.",
        shows=(Died("Libfabric EFA provider has encountered an internal error"),),
        sentence="libfabric called abort(); its next lines name the error",
        sure=False,
        cause="`RMA address verification failed` (4111): the peer does not know the address or key: it restarted, or "
        "its memory was freed or registered with another card. `Unresponsive receiver`, `Unreachable remote`: the peer "
        "is gone, or the security group does not let all traffic of EFA through between the nodes. `Local ...`: this "
        "side's memory.",
        now="restart both sides together; the peer's log of a minute before; the security group open to itself in both "
        "directions; one release of the EFA installer, libfabric and nixl on all nodes; NIXL over UCX for a try: "
        '`"backends": ["UCX"]` with UCX_TLS=tcp,cuda_copy,cuda_ipc',
        good="peers that end together, and one EFA installation on all nodes",
        threads=("https://github.com/ai-dynamo/nixl/pull/2278",),
    ),
)
