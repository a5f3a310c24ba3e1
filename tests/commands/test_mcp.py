import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import clean_environment
from tests.diagnose.lines import LOGS

mcp = pytest.importorskip("mcp.client.client", reason="the package mcp (kvfix[mcp]) is not installed")


def call(root: Path, *calls: tuple[Any, ...]) -> list[Any]:
    """Start an MCP server for `root`. Return the result of each call. A call is a client method and its arguments."""
    from mcp.client.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    async def connected() -> list[Any]:
        arguments = ["-m", "kvfix_tools.cli", "mcp", str(root)]
        parameters = StdioServerParameters(command=sys.executable, args=arguments, env=clean_environment())
        async with Client(stdio_client(parameters)) as client:
            return [await getattr(client, method)(*given) for method, *given in calls]

    return asyncio.run(asyncio.wait_for(connected(), 120))


def answer(result: Any) -> dict[str, Any]:
    assert not result.is_error, result.content
    return dict(json.loads(result.content[0].text))


def test_its_tools_answer_as_the_commands(tmp_path: Path) -> None:
    shutil.copy(LOGS / "crash-0.3.10.log.gz", tmp_path / "engine.log.gz")
    listed, *results = call(
        tmp_path,
        ("list_tools",),
        ("call_tool", "diagnose", {"paths": ["engine.log.gz"]}),
        ("call_tool", "diagnose", {"paths": ["engine.log.gz"], "brief": True}),
        ("call_tool", "explain", {"name": "KVD101"}),
    )
    tools = {tool.name: tool for tool in listed.tools}
    assert set(tools) == {"diagnose", "explain", "search", "status", "doctor", "replay", "look"}
    assert all(tool.description for tool in tools.values())
    full, brief, explained = map(answer, results)
    assert full["exit_code"] == 1
    assert [found["code"] for found in full["answer"]["findings"]] == ["KVD101"]
    assert "KVF001" in full["answer"]["findings"][0]["do_now"]
    assert "KVD101" in brief["answer"]
    assert len(brief["answer"].encode()) <= 8000
    assert explained["answer"]["code"] == "KVD101"


def test_nothing_outside_its_folder_is_read(tmp_path: Path) -> None:
    root = tmp_path / "logs"
    root.mkdir()
    (tmp_path / "secret.log").write_text("AssertionError: Mismatch in tokens to load\n")
    (root / "link.log").symlink_to(tmp_path / "secret.log")
    paths = ("../secret.log", "/etc/hostname", "link.log")
    for result in call(root, *(("call_tool", "diagnose", {"paths": [path]}) for path in paths)):
        assert result.is_error
        assert "is not below" in result.content[0].text
        assert "Mismatch" not in str(result.content)
