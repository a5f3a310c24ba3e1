"""A page for each rule of the ledger, from its docstring; and their list."""

from __future__ import annotations

import inspect

from kvfix import cures, fix
from kvfix.ledger import RULES, Rule
from kvfix_tools.docs.markdown import code, link, prose, table


def pages() -> dict[str, str]:
    rules = sorted(RULES)
    return {"rules/index.md": _index(rules), **{f"rules/{each.code.lower()}.md": _page(each) for each in rules}}


def _title(rule: Rule) -> str:
    return inspect.cleandoc(rule.doc).partition("\n\n")[0].replace("\n", " ")


def _page(rule: Rule) -> str:
    when = inspect.cleandoc(rule.on.__doc__ or "").partition("\n")[0]
    rows = [
        (link(each), (found.slug if (found := fix.find(each)) else ""), code(words) if words else "")
        for known, words, codes in cures.CURES
        if known == rule.code
        for each in codes
    ]
    cured = table(("fix", "", "where the message matches"), rows) if rows else "None that kvfix has.\n"
    return (
        f"# {rule.code} {rule.name}\n\n{prose(inspect.cleandoc(rule.doc))}\n\n"
        f"Looked at when: {when} (`{rule.on.__name__}`)\n\n## Cured by\n\n{cured}"
    )


def _index(rules: list[Rule]) -> str:
    rows = [(link(each.code), each.name, _title(each)) for each in rules]
    return (
        "# Rules\n\nWhat must hold of each request's tokens, whatever connector is used. In the modes `check` and "
        "`strict` each is looked at in the engine ([modes](../engine.md)); the lab, `kvfix replay` and "
        f"`kvfix-diagnose` judge by the same.\n\n{table(('code', 'rule', ''), rows)}"
    )
