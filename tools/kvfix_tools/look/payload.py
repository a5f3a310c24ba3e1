"""The code that `kvfix look` runs inside an engine: the modules of kvfix.engine_state, which it sends along.

The modules stay in the process under a private name, so a second look sends only a call.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import kvfix.engine_state

#: The answer of a process without the modules.
MISSING = "null"
#: The package itself ("") is last, because it imports the other modules.
_MODULES = ("places", "recorded", "needs", "reader", "lmcache_readers", "connectors", "scheduler", "")

_BRING = """
import sys
name, parts = {name!r}, {parts!r}
if name not in sys.modules:
    made = [name]
    try:
        package = sys.modules[name] = type(sys)(name)
        package.__path__, package.__package__ = [], name
        for part, text in parts:
            module = package
            if part:
                made.append(name + "." + part)
                module = sys.modules[made[-1]] = type(sys)(made[-1])
                module.__package__ = name
                setattr(package, part, module)
            exec(compile(text, "engine_state/" + (part or "__init__") + ".py", "exec"), module.__dict__)
    except BaseException:
        for each in made:
            sys.modules.pop(each, None)
        raise
"""
#: The main thread compiles this text in each look, so it is short.
_ASK = """
import sys
package, answer = sys.modules.get({name!r}), "null"
if package is not None:
    import json
    answer = json.dumps(package.collect({full!r}))
with open(ANSWER, "w") as file:
    file.write(answer)
"""


def code(full: bool, bring: bool) -> str:
    """Return Python code that answers the state as JSON, or MISSING. bring: send the modules too."""
    name, sources = _sources()
    ask = _ASK.format(name=name, full=full)
    return _BRING.format(name=name, parts=sources) + ask if bring else ask


@cache
def _sources() -> tuple[str, list[tuple[str, str]]]:
    """Return a name that changes with the code, and the code of each module."""
    folder = Path(kvfix.engine_state.__file__).parent
    texts = [(each, (folder / f"{each or '__init__'}.py").read_text(encoding="utf-8")) for each in _MODULES]
    return f"_kvfix_engine_state_{hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12]}", texts
