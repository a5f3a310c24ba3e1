"""Pages of `kvfix conform`: its rules, its example, and its verdicts on vLLM's connectors."""

from __future__ import annotations

from pathlib import Path

from kvfix_tools.conform.contract import RULES, Rule
from kvfix_tools.conform.scenario import NEEDS, scenarios
from maintain import connectors as kit
from maintain.documentation.markdown import links, prose, table

HEAD = """# What a connector must keep

A KV connector for vLLM is a class with hooks (`vllm/distributed/kv_transfer/kv_connector/v1/base.py`, "base" below).
The base class says only in part what the hooks must do. The scheduler (`v1/core/sched/scheduler.py`, "sched") assumes
the rest.
Lines are those of vLLM 0.32.0. [kvfix conform](conform.md) tests each rule on a connector of yours.

"""
_WORDS = {"ok": "ok", "violated": "**violated**", "not applicable": "-"}


def page() -> str:
    return HEAD + "\n".join(_of_rule(rule) for rule in RULES)


def _of_rule(rule: Rule) -> str:
    rows = [
        (f"`{each.name}`", each.title, "; ".join(NEEDS[need].partition(":")[0] for need in each.needs))
        for each in scenarios()
        if each.rule == rule.slug
    ]
    played = table(("scenario", "what happens", "not played if"), rows) if rows else ""
    codes = f"Known by {links(rule.codes, up='')}, in any scenario.\n\n" if rule.codes else ""
    return f"## {rule.slug}\n\n**{rule.title}.** {prose(rule.doc)}\n\n{codes}{played}"


def connector() -> str:
    """The example of the documentation."""
    code = (Path(kit.FILE).parent / "folder_connector.py").read_text()
    return f"```python\n{code}```"


def connectors() -> str:
    """Return a table of the verdicts on vLLM's connectors, and why some of them do not run."""
    runs = kit.load()
    can = [run for run in runs if not run.cannot]
    headings = ("rule", *(run.name for run in can))
    rows = [
        (f"[{rule.slug}](contract.md#{rule.slug})", *(_WORDS[run.verdicts[rule.slug]] for run in can)) for rule in RULES
    ]
    loads = ("tokens loaded", *(f"{run.loaded}" for run in can))
    notes = "".join(f"- {run.name}: {run.note}\n" for run in runs if run.note)
    cannot = table(("connector", "cannot be run here"), [(run.name, run.cannot) for run in runs if run.cannot])
    return f"vLLM {kit.version()}\n\n{table(headings, [*rows, loads])}\n{notes}\n{cannot}"
