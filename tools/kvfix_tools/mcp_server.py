"""`kvfix mcp`: offer commands of kvfix as tools of a Model Context Protocol server on standard input and output."""

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

_ROOT = "Read files only below this folder."
_LIMIT, _LONGEST = 600, 200_000  # limits of one command: seconds, and characters of its output
INSTRUCTIONS = """kvfix explains failures of KV-cache connectors in vLLM (LMCache, NIXL, OffloadingConnector, Mooncake).
Begin with `diagnose` and brief=true, or with `look` for an engine that hangs now. Look up a code (KVF, KVD, KVR) with
`explain`, and a description without a log with `search`. A remedy is exact for the releases that the log names: do not
replace the remedy by another one."""


def serve(root: Annotated[Path, typer.Argument(metavar="DIR", help=_ROOT)] = Path()) -> int:
    """Run a Model Context Protocol server, which offers commands of kvfix to a language model (needs kvfix[mcp])."""
    try:
        server = make(root)
    except ImportError:
        print("kvfix mcp: the package mcp 2 is not installed. Run: pip install 'mcp>=2'", file=sys.stderr)
        return 2
    server.run("stdio")
    return 0


def make(root: Path) -> "MCPServer[Any]":
    """Return a server that reads only files below `root`. Raise ImportError without the package mcp 2."""
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    root = root.resolve()
    server: MCPServer[Any] = MCPServer("kvfix", instructions=INSTRUCTIONS, log_level="WARNING")

    def below(path: str) -> str:
        found = (root / path).resolve()
        if not found.is_relative_to(root):
            raise ToolError(f"{path} is not below {root}. This server reads files below {root} only")
        return str(found)

    @server.tool()
    async def diagnose(paths: list[str], brief: bool = False, request: str = "") -> dict[str, Any]:
        """Explain log files of vLLM and LMCache: findings with cause, evidence and remedy.

        brief: return 8 kB of text with root exceptions and unrecognised failures.
        request: return the history of this request as text."""
        options = ["--brief", "-"] if brief else ["--request", request] if request else ["--json"]
        return await _run("diagnose", *options, "--", *map(below, paths))

    @server.tool()
    async def explain(name: str) -> dict[str, Any]:
        """Explain a fix (KVF001), a finding or a problem in logs (KVD101) or a rule (KVR003, LAB001)."""
        return await _run("explain", "--json", "--", name)

    @server.tool()
    async def search(text: str) -> dict[str, Any]:
        """Find the fix, known problem or rule that explains a symptom. Return the three best matches.

        A match is not a diagnosis. For a log use `diagnose`."""
        return await _run("search", "--json", "--", f"{text}\n")  # a text with a newline is never a file name

    @server.tool()
    async def status() -> dict[str, Any]:
        """Show which fixes vLLM and LMCache need, in the releases that are installed for this server's Python."""
        return await _run("status", "--json")

    @server.tool()
    async def doctor(command: list[str] | None = None) -> dict[str, Any]:
        """Check a set-up before the launch. command: e.g. ["vllm", "serve", "MODEL", ...]. kvfix does not run it."""
        return await _run("doctor", "--json", *(["--", *command] if command else []))

    @server.tool()
    async def replay(paths: list[str]) -> dict[str, Any]:
        """Check recorder files or bundles of `kvfix dump` again, and return the violated rules."""
        return await _run("replay", "--json", "--", *map(below, paths))

    @server.tool()
    async def look(pid: int) -> dict[str, Any]:
        """Find out why the running engine of this process makes no progress, without changing the engine.

        The answer has the verdict, what to do without a restart, whether waiting helps, and what each request waits
        for."""
        return await _run("look", "--json", "--", str(pid))

    return server


async def _run(*arguments: str) -> dict[str, Any]:
    """Run a kvfix command. Return "exit_code", "answer" (JSON or text from stdout), "errors" (from stderr)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvfix_tools.cli", *arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, errors = await asyncio.wait_for(process.communicate(), _LIMIT)
    except TimeoutError:
        process.kill()
        return {"exit_code": None, "answer": None, "errors": f"kvfix {arguments[0]} took more than {_LIMIT} s"}
    answer, said = out.decode("utf-8", "replace"), errors.decode("utf-8", "replace")[:4000]
    if len(answer) > _LONGEST:
        said = f"the answer has {len(answer)} characters and was cut to {_LONGEST}. Ask with brief=true"
        answer = answer[:_LONGEST]
    else:
        with suppress(ValueError):
            answer = json.loads(answer)
    return {"exit_code": process.returncode, "answer": answer, "errors": said}
