"""Check that vLLM loads kvfix in all processes, and list the fixes of kvfix for the installed releases."""

from collections.abc import Iterator

from kvfix import applicability, catalogue, installed_source
from kvfix.fixes.record import Target
from kvfix_tools.doctor.checks import Line, check, ok, problem
from kvfix_tools.doctor.checks.model import has_windows
from kvfix_tools.doctor.setup import Setup


@check("plugins")
def plugins(setup: Setup) -> Iterator[Line]:
    """If KVFIX and VLLM_PLUGINS are set, checks that VLLM_PLUGINS names kvfix. vLLM loads only the listed plugins."""
    listed = setup.environment.get("VLLM_PLUGINS")
    mode = setup.environment.get("KVFIX", "")
    if listed is None or not mode or mode.startswith("off"):
        return
    names = [each.strip() for each in listed.split(",")]
    if "kvfix" not in names:
        both = ",".join([*filter(None, names), "kvfix"])
        yield problem(f"KVFIX={mode} is set, but VLLM_PLUGINS={listed} drops kvfix", f"VLLM_PLUGINS={both}")
    else:
        yield ok("VLLM_PLUGINS names kvfix")


@check("fixes")
def fixes(setup: Setup) -> Iterator[Line]:
    """Lists the known bugs that kvfix fixes in the installed releases, without the bugs of opt-in fixes. Reports no
    problem, because the user's settings do not cause the bugs."""
    if setup.packages.places is not None or (setup.vllm is None and setup.lmcache is None):
        return
    fixes = [fix for fix in catalogue.fixes() if not fix.opt_in]
    codes = [fix.code for fix in fixes if any(row.verdict == "applicable" for row in catalogue.rows_of(fix))]
    if codes and _is_off(setup):
        what = f"kvfix has fixes for {len(codes)} known bugs of these releases: {', '.join(codes)}"
        yield ok(what, "kvfix run -- CMD, or KVFIX=fix in the environment; kvfix status shows the bugs")
    elif codes:
        yield ok(f"kvfix will apply {len(codes)} fixes: {', '.join(codes)}")


@check("sliding-windows")
def sliding_windows(setup: Setup) -> Iterator[Line]:
    """If the multi-process connector needs the fixes for sliding windows, checks that kvfix is on. Without the fixes,
    LMCache stores wrong KV under valid keys, and the model returns wrong text without an error."""
    if setup.mp is None or not has_windows(setup) or setup.has_option("disable-hybrid-kv-cache-manager"):
        return
    fixes = [fix for fix in catalogue.fixes() if "KVR014" in fix.evidence]
    codes = [fix.code for fix in fixes if any(_has_bug(target, setup) for target in fix.targets)]
    if codes and _is_off(setup):
        what = f"the model has sliding windows, and this LMCache stores wrong KV for such models: {', '.join(codes)}"
        yield problem(what, "kvfix run -- CMD, or KVFIX=fix in the environment, or --disable-hybrid-kv-cache-manager")
    elif codes:
        yield ok(f"the model has sliding windows, and kvfix fixes their stores: {', '.join(codes)}")


def _is_off(setup: Setup) -> bool:
    return setup.environment.get("KVFIX", "").partition(" ")[0] in ("", "off")


def _has_bug(target: Target, setup: Setup) -> bool:
    """Return True if kvfix knows that the installed function has the bug. The package may be in another Python."""
    package = setup.packages.get(target.dist)
    file = package.file(target.module) if package else None
    known = applicability.fingerprints()[target.dist]["functions"].get(target.name, {})
    releases = known.get(installed_source.fingerprint(file, target.function)) if file else None
    return releases is not None and applicability.judge_releases(target, releases).state == "applicable"
