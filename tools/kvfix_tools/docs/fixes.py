"""A page for each fix, from its docstring, its patches, and what the lab saw; and their list."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

from kvfix import cures, fix, verdict
from kvfix.fix import Fix
from kvfix_tools import upstream
from kvfix_tools.diagnose import findings, remedy
from kvfix_tools.docs import matrix
from kvfix_tools.docs.markdown import NAMES, facts, link, links, prose, span, table
from kvfix_tools.lab.matrix import Pairs


def pages(pairs: Pairs) -> dict[str, str]:
    made = {"fixes/index.md": _index()}
    return {**made, **{f"fixes/{each.code.lower()}.md": _page(each, pairs) for each in fix.catalogue()}}


def wrong_in(found: Fix) -> str:
    """Releases of whose code kvfix knows the fingerprint, and knows it to be wrong."""
    told = []
    for dist in dict.fromkeys(patch.dist for patch in found.patches):
        known = verdict.fingerprints()[dist]
        wrong = {
            release
            for patch in found.patches
            for same in known["functions"].get(patch.target, {}).values()
            for release in same
            if patch.dist == dist and release in SpecifierSet(patch.broken, prereleases=True)
        }
        told.append(f"{NAMES[dist]} {span(sorted(wrong), known['releases'])}")
    return "; ".join(told)


def _choice(found: Fix) -> str:
    if not found.mends:
        return "none, for it cannot be corrected from outside; `kvfix status` tells of it"
    if found.opt_in:
        return f'opt-in: `kvfix.apply(only=["{found.code}"])`, or `KVFIX="fix only={found.code}"`'
    return f'on by default; `KVFIX="fix skip={found.code}"` leaves it out'


def _right(found: Fix) -> str:
    dists = dict.fromkeys(patch.dist for patch in found.patches)
    return "; ".join(f"{NAMES[dist]} {remedy.first_right(found, dist) or 'none yet'}" for dist in dists)


def _page(found: Fix, pairs: Pairs) -> str:
    targets = dict.fromkeys(f"`{patch.target}`" for patch in found.patches)
    patches = [row for row in upstream.ready() if row.code == found.code]
    ready = ", ".join(f"{NAMES[row.dist]} {row.version}" for row in patches)
    export = [f"for {ready}: `kvfix upstream export {found.code}`"] if ready else []
    without = [f"none for {NAMES[dist]}: {why}" for (code, dist), why in upstream.WITHOUT.items() if code == found.code]
    rules = dict.fromkeys(rule for rule, _, codes in cures.CURES if found.code in codes)
    about = facts(
        {
            "Wrong in": wrong_in(found),
            "First right release": _right(found),
            "Choice": _choice(found),
            "Corrects" if found.mends else "Looks at": ", ".join(targets),
            "In a log": links(each.code for each in findings.catalogue() if found.code in each.fixes),
            "In the ledger": links(rules),
            "Patch for upstream": "; ".join([*export, *without]),
        }
    )
    title, _, rest = (found.doc or "").strip().partition("\n")
    return (
        f"# {found.code} {found.slug}\n\n**{title}**\n\n{about}\n{prose(rest)}\n\n"
        f"## Seen by the lab\n\n{matrix.of_fix(pairs, found.code)}"
    )


def _index() -> str:
    rows = [(link(each.code), each.slug, each.title, wrong_in(each)) for each in fix.catalogue()]
    return (
        "# Fixes\n\nA file of `patches/kvfix/fixes/` each; `kvfix explain CODE` prints the same. KVF0xx is LMCache in "
        "the engine's own process, KVF1xx its multi-process connectors, KVF2xx vLLM; KVF9xx cannot be corrected from "
        f"outside, and has a workaround.\n\n{table(('code', 'fix', 'what is wrong', 'wrong in'), rows)}"
    )
