"""OffloadingConnector of vLLM: what it says of itself at its start."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine


@finding("KVD539", "every-group-taken-for-drafts", Severity.SLOW, on=["draft_groups"])
def every_group_taken_for_drafts(log: Diagnosis, line: LogLine) -> Answer | None:
    """With speculative decoding OffloadingConnector drops the end of every KV group's hit, and may find nothing at all.

    Cause: no KV group is marked as the draft model's, and then vLLM before 0.32 takes all for it (vllm#52735). A group
    of state or of a window can serve one chunk only: without its last chunk the whole hit is 0. It is this if `External
    prefix cache hit rate` stays at 0.0%.

    Setting: without `--speculative-config`, or without OffloadingConnector (`--kv-offloading-size`), which then only
    costs memory.

    Good: upgrade to vLLM 0.32.0 or newer.

    Normal: the groups of the draft model alone, such as `[3]`.
    """
    groups = [int(number) for number in re.findall(r"\d{1,6}", line.fields["groups"])]
    if len(groups) < 2 or groups != list(range(len(groups))) or log.releases.within("vllm", ">=0.32"):
        return None
    return Answer(f"all {len(groups)} groups are taken for those of the draft model", request="", verdict="unknown")
