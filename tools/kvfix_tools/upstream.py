"""`kvfix upstream`: list and export patches for LMCache and vLLM that are ready to send.

`git format-patch` wrote each `patches/upstream/<slug>/<dist>-<version>.patch`. A patch changes a function, and adds a
test that fails without the change. The stored patches have no author. LMCache and vLLM require the submitter's sign-off
(DCO), so `export` writes the submitter's name into the patch.
"""

import json as jsonlib
import re
import subprocess
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.table import Table

from kvfix import catalogue
from kvfix_tools import screen
from kvfix_tools.command_options import Json, value

app = typer.Typer(no_args_is_help=True, help="List and export patches for LMCache and vLLM.")
#: Folders of the patches. An installed wheel has the first folder, a checkout has the second.
FOLDERS = (Path(__file__).with_name("upstream_patches"), Path(__file__).parents[2] / "patches/upstream")


class Ready(NamedTuple):
    """A patch for one release of one distribution."""

    code: str
    slug: str
    dist: str
    version: str
    subject: str
    path: Path


def ready() -> list[Ready]:
    found = []
    for folder in FOLDERS:
        for path in folder.glob("*/*.patch"):
            dist, _, version = path.stem.partition("-")
            known = catalogue.find(path.parent.name)
            header = path.read_text().partition("\n\n")[0]
            folded = re.search(r"^Subject: (?:\[PATCH\] )?(.*(?:\n .*)*)", header, re.M)
            subject = " ".join(folded[1].split()) if folded else ""
            found.append(Ready(known.code if known else "", path.parent.name, dist, version, subject, path))
    return sorted(found)


@app.command("list")
def show(json: Json = False) -> int:
    """List the patches with their fix, release and subject."""
    rows = ready()
    if json:
        print(jsonlib.dumps([{**row._asdict(), "path": str(row.path)} for row in rows], indent=2))
        return 0
    table = Table("code", "fix", "for", "subject", box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(row.code, row.slug, f"{row.dist} {row.version}", row.subject)
    screen.console().print(table)
    for known in catalogue.fixes():
        for dist, why in known.no_patch.items():
            print(f"no patch of {known.code} for {dist}: {why}")
    return 0


@app.command()
def export(
    name: Annotated[str, typer.Argument(metavar="CODE|SLUG", help="A fix that kvfix upstream list shows.")],
    folder: Annotated[Path, value("DIR", "Write into this folder.", "-o", "--output")] = Path("."),
) -> int:
    """Write the patches of a fix. `git am` can apply them. Their sign-off has your name and address from git."""
    known = catalogue.find(name)
    wanted = [row for row in ready() if known is not None and row.code == known.code]
    if not wanted:
        guess = screen.did_you_mean(name, {row.slug for row in ready()})
        return screen.error(f"kvfix upstream export: no patch for {name!r}.{guess} List all: kvfix upstream list")
    submitter: list[str] = []
    with suppress(OSError):  # git is not installed
        for key in ("user.name", "user.email"):
            done = subprocess.run(["git", "config", key], capture_output=True, text=True, check=False)
            submitter.append(done.stdout.strip())
    if not submitter or not all(submitter):
        return screen.error(
            "kvfix upstream export: git does not know your name and address, and both projects require your sign-off "
            "(DCO). Run: git config --global user.name NAME; git config --global user.email ADDRESS"
        )
    who = "{} <{}>".format(*submitter)
    folder.mkdir(parents=True, exist_ok=True)
    for row in wanted:
        path = folder / f"{row.slug}-{row.dist}-{row.version}.patch"
        patch = re.sub(r"^From: .*$", f"From: {who}", row.path.read_text(), count=1, flags=re.M)
        patch = re.sub(r"^Date: .*$", f"Date: {formatdate(localtime=True)}", patch, count=1, flags=re.M)
        path.write_text(patch.replace("\n---\n", f"\nSigned-off-by: {who}\n---\n", 1))
        print(f"{path}: apply it to a checkout of {row.dist} with: git am --3way {path}")
    return 0
