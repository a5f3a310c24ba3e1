"""`make knowledge`: compile the known problems, `diagnose/knowledge/*.toml`, to `diagnose/knowledge.json`.

kvfix reads the JSON, because Python 3.10 has no reader for TOML, and a JSON file loads in milliseconds.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import tomllib

from kvfix_tools.diagnose.grammar import FILE
from kvfix_tools.diagnose.problems import Problem

FOLDER = FILE.with_suffix("")
#: Three kinds of files have no records of problems: retired codes, messages of the grammar, and other tables.
RETIRED, MESSAGES, TABLES = "retired.toml", "messages.toml", ("connectors.toml", "words.toml")


def records(file: Path) -> list[dict[str, Any]]:
    """Return the records of this file. End the program if a record does not fit the schema (`Problem`)."""
    try:
        tables = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise SystemExit(f"knowledge: {file.name}: {error}") from None
    made = []
    for name, table in tables.items():
        try:
            record = {"name": name, **table}
            msgspec.convert(record, Problem)
        except (TypeError, msgspec.ValidationError) as error:
            raise SystemExit(f"knowledge: {file.name}: [{name}]: {error}") from None
        made.append(record)
    return made


def compiled() -> str:
    """Return the JSON with a line for each record. Files are sorted by name. Records keep the order in their file."""
    files = sorted(file for file in FOLDER.glob("*.toml") if file.name not in (RETIRED, MESSAGES, *TABLES))
    rows = ",\n".join(json.dumps(record, ensure_ascii=False) for file in files for record in records(file))
    gone = tomllib.loads((FOLDER / RETIRED).read_text())
    retired = {code: group["why"] for group in gone["group"] for code in group["codes"]}
    retired |= {code: f"{now} now has the log lines of this code" for code, now in gone["moved"].items()}
    others = {"retired": retired, "messages": tomllib.loads((FOLDER / MESSAGES).read_text())}
    for name in TABLES:
        others |= tomllib.loads((FOLDER / name).read_text())
    return f'{{"problems": [\n{rows}\n],\n{json.dumps(others, indent=0)[2:]}\n'


def main() -> None:
    FILE.write_text(compiled())
