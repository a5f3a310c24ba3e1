"""kvfix itself: does it reach the processes, and what has it for these releases."""

from __future__ import annotations

from collections.abc import Iterator

from kvfix import catalogue, fix_status
from kvfix_tools.doctor.checks import Line, check, ok, problem
from kvfix_tools.doctor.setup import Setup


@check("plugins")
def plugins(setup: Setup) -> Iterator[Line]:
    """VLLM_PLUGINS, where it is set, names kvfix too, if kvfix is switched on: vLLM drops every other plugin."""
    listed = setup.environment.get("VLLM_PLUGINS")
    mode = setup.environment.get("KVFIX", "")
    if listed is None or not mode or mode.startswith("off"):
        return
    names = [each.strip() for each in listed.split(",")]
    if "kvfix" not in names:
        both = ",".join([*filter(None, names), "kvfix"])
        yield problem(f"KVFIX={mode} is set, and VLLM_PLUGINS={listed} drops kvfix", f"VLLM_PLUGINS={both}")
    else:
        yield ok("VLLM_PLUGINS names kvfix")


@check("fixes")
def fixes(setup: Setup) -> Iterator[Line]:
    """Known bugs of the installed releases for which kvfix has a fix. They are no fault of the set-up, and never a
    problem here. Fixes that have to be named (KVF017, say) are left out."""
    if setup.packages.places is not None or (setup.vllm is None and setup.lmcache is None):
        return
    fixes = [fix for fix in catalogue.fixes() if not fix.opt_in]
    codes = [fix.code for fix in fixes if any(row.verdict == "applicable" for row in fix_status.rows_of(fix))]
    if codes and setup.environment.get("KVFIX", "").partition(" ")[0] in ("", "off"):
        yield ok(
            f"kvfix has fixes for {len(codes)} known bugs of these releases: {', '.join(codes)}",
            "KVFIX=fix in the environment, or kvfix run -- CMD; kvfix status says more",
        )
    elif codes:
        yield ok(f"kvfix will apply {len(codes)} fixes: {', '.join(codes)}")
