"""The command `kvfix dump`: read the processes of an engine, write a bundle, and print a summary."""

import io
import json as jsonlib
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import kvfix
from kvfix_tools import screen
from kvfix_tools.dump import gather, processes


def dump(pid: int, out: Path, json: bool) -> int:
    """Write a bundle. Return 2 if the write fails or no process `pid` exists, 77 if no process is readable, else 0."""
    tree = processes.tree(pid)
    if not tree:
        return screen.error(f"kvfix dump: there is no process {pid}")
    tree += processes.elsewhere(tree)
    print(f"reading stacks and recorders of {len(tree)} processes ...", file=sys.stderr)
    rows, files = gather.gather(tree)
    bundle = out / f"kvfix-dump-{pid}-{time.strftime('%Y%m%dT%H%M%S')}.tar.gz"
    try:
        _write(bundle, tree, rows, files)
    except OSError as error:
        return screen.error(f"kvfix dump: {bundle}: {error.strerror}")
    if json:
        print(jsonlib.dumps({"bundle": str(bundle), "processes": rows}, indent=2))
    else:
        print(f"{_summary(rows)}Bundle: {bundle}")
    return 77 if all(row["hook"] is None for row in rows) else 0


def _summary(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        ranks = f" ({', '.join(row['ranks'])})" if row["ranks"] else ""
        unread = "kvfix could not read this process, which may be in a connector hook"
        hook = unread if row["hook"] is None else row["hook"] or "in no connector hook"
        lines.append(f"{row['pid']} {row['name']}{ranks}: {hook}")
        lines += [f"    {row[what]}" for what in ("stacks", "recorder") if " " in row[what]]
    return "\n".join(lines) + "\n"


def _write(bundle: Path, tree: list[processes.Process], rows: list[dict[str, Any]], files: dict[str, str]) -> None:
    parts = {
        "summary.txt": _summary(rows),
        "processes.json": jsonlib.dumps([process._asdict() for process in tree], indent=2),
        "status.json": jsonlib.dumps([row._asdict() for row in kvfix.status()], indent=2),
        **files,
    }
    bundle.touch(0o600, exist_ok=False)
    try:
        with tarfile.open(bundle, "w:gz") as archive:
            for part, text in parts.items():
                content = text.encode()
                entry = tarfile.TarInfo(f"{bundle.name.removesuffix('.tar.gz')}/{part}")
                entry.size, entry.mode, entry.mtime = len(content), 0o600, int(time.time())
                archive.addfile(entry, io.BytesIO(content))
    except BaseException:  # remove the incomplete bundle, for example if the disk is full
        bundle.unlink()
        raise
