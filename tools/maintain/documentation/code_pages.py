"""Make a page for each fix, each finding of kvfix-diagnose and each rule. Make tables of fixes, findings and rules."""

import inspect

import tomllib

from kvfix import applicability, catalogue
from kvfix.fixes.record import Fix
from kvfix_tools import fix_overview, upstream
from kvfix_tools.diagnose import problems
from kvfix_tools.lab.engine import rules as lab_rules
from kvfix_tools.lab.engine.rules import LabRule
from kvfix_tools.ledger import RULES, Rule
from maintain import knowledge
from maintain.documentation import error_index, support_matrix
from maintain.documentation.markdown import NAMES, code, facts, filtered, link, links, prose, sections, span, table
from maintain.scenario_matrix import Pairs

#: {connector: component of its findings}. Components are names of files in diagnose/knowledge (*.toml).
_COMPONENTS = {
    "LMCacheConnectorV1": "lmcache",
    "LMCacheMPConnector": "lmcache-server",
    "MooncakeConnector": "mooncake",
    "NixlConnector": "nixl",
    "OffloadingConnector": "offloading",
    "SimpleCPUOffloadConnector": "offloading",
}
ALL_RULES: list[Rule | LabRule] = [*sorted(RULES), *lab_rules.RULES]


def pages(pairs: Pairs) -> dict[str, str]:
    """Return {path below docs/: markdown} of all pages. The site's menu lists the pages of a folder in this order."""
    return {
        **{f"fixes/{each.code.lower()}.md": of_fix(each, pairs) for each in catalogue.fixes()},
        **{f"findings/{each.code.lower()}.md": of_problem(each) for each in problems.catalogue()},
        **{f"rules/{each.code.lower()}.md": of_rule(each) for each in ALL_RULES},
    }


def fixes() -> str:
    connectors = {each.code: ", ".join(sorted(fix_overview.connectors(each))) for each in catalogue.fixes()}
    rows = [
        (link(each.code), connectors[each.code] or "every connector", each.effect, each.title, wrong_in(each))
        for each in catalogue.fixes()
    ]
    return filtered(("fix", "connector", "effect", "what is wrong", "wrong in"), rows, up="../")


def rules() -> str:
    docs = {each.code: inspect.cleandoc(each.doc).partition("\n\n")[0].replace("\n", " ") for each in ALL_RULES}
    return table(("code", "rule", ""), [(link(each.code), each.name, docs[each.code]) for each in ALL_RULES])


def findings() -> str:
    files = {name: file.stem for file in knowledge.FOLDER.glob("*.toml") for name in tomllib.loads(file.read_text())}
    rows = [
        (each.code, _component(each) if each.on else files[each.name], each.severity.word, each.title)
        for each in problems.catalogue()
    ]
    linked = [(link(code), component, effect, title) for code, component, effect, title in sorted(rows)]
    return filtered(("code", "component", "effect", "what"), linked, up="../")


def _component(problem: problems.Problem) -> str:
    fixes = catalogue.handling(problem.code, problem.message)
    connectors = {connector for fix in fixes for connector in fix_overview.connectors(fix) or ["every connector"]}
    components = {_COMPONENTS.get(connector, "vllm") for connector in connectors}
    return components.pop() if len(components) == 1 else "several"


def of_fix(fix: Fix, pairs: Pairs) -> str:
    ready = ", ".join(f"{NAMES[row.dist]} {row.version}" for row in upstream.ready() if row.code == fix.code)
    export = [f"for {ready}: `kvfix upstream export {fix.code}`"] if ready else []
    without = [f"none for {NAMES[dist]}: {why}" for dist, why in fix.no_patch.items()]
    right = (f"{NAMES[dist]} {fix_overview.first_right(fix, dist) or 'none yet'}" for dist in fix.dists)
    about = {
        "Wrong in": wrong_in(fix),
        "First right release": "; ".join(right),
        "Applied": _applied(fix),
        "Fixes" if fix.fixable else "Looks at": ", ".join(dict.fromkeys(f"`{each.name}`" for each in fix.targets)),
        "In a log": links(rule for rule in fix.evidence if rule.startswith("KVD")),
        "In the ledger": links(rule for rule in fix.evidence if rule.startswith("KVR")),
        "Patch for upstream": "; ".join([*export, *without]),
    }
    rest = (fix.doc or "").strip().partition("\n")[2]
    played = f"## Played by the lab\n\n{support_matrix.of_fix(pairs, fix.code)}"
    return f"# {fix.code} {fix.slug}\n\n**{fix.title}**\n\n{facts(about)}\n{prose(rest)}\n\n{played}"


def wrong_in(fix: Fix) -> str:
    wrong = {dist: sorted(fix_overview.wrong_releases(fix, dist)) for dist in fix.dists}
    known = applicability.fingerprints()
    return "; ".join(f"{NAMES[dist]} {span(its, known[dist]['releases'])}" for dist, its in wrong.items())


def _applied(fix: Fix) -> str:
    if not fix.fixable:
        return "never: kvfix cannot fix this bug from outside. `kvfix status` reports the bug"
    if fix.opt_in:
        return f'if you name it: `kvfix.apply(plus=["{fix.code}"])`, or `KVFIX="fix plus={fix.code}"`'
    return f'by default; `KVFIX="fix skip={fix.code}"` leaves it out'


def of_problem(problem: problems.Problem) -> str:
    fixes = catalogue.handling(problem.code, problem.message)
    cause = problem.why + ("" if problem.certain else " The log line alone does not prove this cause.")
    if not cause and fixes:
        cause = f"{prose(fixes[0].section('Cause'))}\n\n({link(fixes[0].code)})"
    rows = [(link(each.code), f"{each.slug}: {each.title}", wrong_in(each)) for each in fixes]
    apply = f"{table(('fix', '', 'wrong in'), rows)}\n`kvfix run -- CMD`, or `kvfix.apply()` before vLLM is launched.\n"
    parts = {
        "In the log": "".join(f"    {text}\n" for text in (*problem.signs, *error_index.of_finding(problem))),
        "Cause": cause,
        "Fixed by": apply if fixes else "",
        "What to do first": problem.first,
        "Do now": problem.do,
        "For good": problem.permanent,
        "Normal": problem.normal,
        "Reports": "".join(f"- <{thread}>\n" for thread in problem.threads),
    }
    about = {
        "Connectors": ", ".join(problem.connectors),
        "Releases": ", ".join(f"{NAMES.get(dist, dist)} {which}" for dist, which in problem.releases.items()),
    }
    head = f"# {problem.code} {problem.name}\n\n**{problem.title}** ({problem.severity.word})"
    return f"{head}\n\n{facts(about)}\n{sections(parts)}"


def of_rule(rule: Rule | LabRule) -> str:
    rows = [
        (link(fix.code), fix.slug, code(words) if (words := fix.evidence[rule.code]) else "")
        for fix in catalogue.handling(rule.code)
    ]
    fixed = table(("fix", "", "where the message matches"), rows) if rows else "No fix of kvfix.\n"
    checked = "Checked by the lab (`kvfix lab`)."
    if not isinstance(rule, LabRule):
        event = inspect.cleandoc(rule.on.__doc__ or "").partition("\n")[0]
        checked = f"Checked at this event: {event} (`{rule.on.__name__}`)"
    return f"# {rule.code} {rule.name}\n\n{prose(inspect.cleandoc(rule.doc))}\n\n{checked}\n\n## Fixed by\n\n{fixed}"
