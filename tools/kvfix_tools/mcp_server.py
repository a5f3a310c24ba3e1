"""`kvfix mcp`: kvfix's commands as tools of a Model Context Protocol server, on standard input and output.

Each tool runs the command itself in a process of its own and answers its JSON. Files are read below one folder only,
which is named at the start; there is no network.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

#: Seconds for one command; bytes of its answer.
_LIMIT, _LONGEST = 600, 200_000
INSTRUCTIONS = """kvfix explains failures of KV-cache connectors in vLLM (LMCache, NIXL, OffloadingConnector, Mooncake).
Begin with `diagnose` and brief=true, or with `look` for an engine that hangs now; look up codes (KVF, KVD, KVR) with
`explain`, descriptions without a log with `search`. Remedies are exact for the releases that the log names: do not
replace them by others."""


def serve(root: Path) -> int:
    """Serve until the client goes. 2 if the package mcp is missing."""
    try:
        server = make(root)
    except ImportError:
        print("kvfix mcp: it needs the package mcp 2: pip install 'mcp>=2'", file=sys.stderr)
        return 2
    server.run("stdio")
    return 0


def make(root: Path) -> MCPServer[Any]:
    """The server. root: files are read below this folder only. Raises ImportError without the package mcp 2."""
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    root = root.resolve()
    server: MCPServer[Any] = MCPServer("kvfix", instructions=INSTRUCTIONS, log_level="WARNING")

    def below(path: str) -> str:
        found = (root / path).resolve()
        if not found.is_relative_to(root):
            raise ToolError(f"{path} is not below {root}, which is all that this server reads")
        return str(found)

    @server.tool()
    async def diagnose(paths: list[str], brief: bool = False, request: str = "") -> dict[str, Any]:
        """Explain log files of vLLM and LMCache: findings with cause, evidence and remedy. brief: 8 kB of text, with
        root exceptions and what was not recognised. request: the history of one request, as text."""
        options = ["--brief", "-"] if brief else ["--request", request] if request else ["--json"]
        return await _run("diagnose", *options, "--", *map(below, paths))

    @server.tool()
    async def explain(name: str) -> dict[str, Any]:
        """A fix (KVF001), a finding or a problem in logs (KVD101), a rule (KVR003, LAB001), by its code or name."""
        return await _run("explain", "--json", "--", name)

    @server.tool()
    async def search(text: str) -> dict[str, Any]:
        """Fixes, known problems and rules that have the words of a description, the best three, and how to confirm
        each. A match is no diagnosis. For a log use `diagnose`."""
        return await _run("search", "--json", "--", f"{text}\n")  # a text of two lines names no file

    @server.tool()
    async def status() -> dict[str, Any]:
        """Which fixes the vLLM and LMCache need that are installed beside this server."""
        return await _run("status", "--json")

    @server.tool()
    async def doctor(command: list[str] | None = None) -> dict[str, Any]:
        """What cannot work in this set-up, before the launch. command: e.g. ["vllm", "serve", "MODEL", ...]. It is
        not run."""
        return await _run("doctor", "--json", *(["--", *command] if command else []))

    @server.tool()
    async def replay(paths: list[str]) -> dict[str, Any]:
        """Recorder files or bundles of `kvfix dump` through the ledger again: what was violated."""
        return await _run("replay", "--json", "--", *map(below, paths))

    @server.tool()
    async def look(pid: int) -> dict[str, Any]:
        """Why nothing moves in the running engine that has this process: the verdict, what to do without a restart,
        whether waiting helps, and who owes each request its next event. It changes nothing in the engine."""
        return await _run("look", "--json", "--", str(pid))

    return server


async def _run(*arguments: str) -> dict[str, Any]:
    """{"exit_code", "answer": its JSON or its text, "errors": what it printed as an error}"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvfix_tools.cli", *arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, errors = await asyncio.wait_for(process.communicate(), _LIMIT)
    except TimeoutError:
        process.kill()
        return {"exit_code": None, "answer": None, "errors": f"kvfix {arguments[0]} took more than {_LIMIT} s"}
    text = out.decode("utf-8", "replace")
    if len(text) > _LONGEST:
        return {
            "exit_code": process.returncode,
            "answer": text[:_LONGEST],
            "errors": f"the answer has {len(text)} characters; this is its beginning. Ask with brief=true",
        }
    try:
        answer = json.loads(text)
    except ValueError:
        answer = text
    return {"exit_code": process.returncode, "answer": answer, "errors": errors.decode("utf-8", "replace")[:4000]}
