"""`kvfix mcp` as a client of the official SDK sees it, which starts the server and talks to it over pipes."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, clean_environment

mcp = pytest.importorskip("mcp.client.client", reason="the package mcp (kvfix[mcp]) is not installed")

LOGS = ROOT / "tests/diagnose/logs"


def call(root: Path, talk: Callable[[Any], Any]) -> Any:
    """Return the result of `talk` with a client that is connected to a server for this folder."""
    from mcp.client.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    async def connected() -> Any:
        parameters = StdioServerParameters(
            command=sys.executable, args=["-m", "kvfix_tools.cli", "mcp", str(root)], env=clean_environment()
        )
        async with Client(stdio_client(parameters)) as client:
            return await talk(client)

    return asyncio.run(asyncio.wait_for(connected(), 120))


def answer(result: Any) -> dict[str, Any]:
    assert not result.is_error, result.content
    found: dict[str, Any] = json.loads(result.content[0].text)
    return found


def test_its_tools(tmp_path: Path) -> None:
    async def talk(client: Any) -> Any:
        return await client.list_tools()

    tools = {tool.name: tool for tool in call(tmp_path, talk).tools}
    assert set(tools) == {"diagnose", "explain", "search", "status", "doctor", "replay", "look"}
    assert all(tool.description for tool in tools.values())


def test_a_log_is_diagnosed_as_by_the_command(tmp_path: Path) -> None:
    shutil.copy(LOGS / "crash-0.3.10.log.gz", tmp_path / "engine.log.gz")

    async def talk(client: Any) -> Any:
        return [
            await client.call_tool("diagnose", {"paths": ["engine.log.gz"]}),
            await client.call_tool("diagnose", {"paths": ["engine.log.gz"], "brief": True}),
            await client.call_tool("explain", {"name": "KVD101"}),
        ]

    full, brief, explained = map(answer, call(tmp_path, talk))
    assert full["exit_code"] == 1
    assert [found["code"] for found in full["answer"]["findings"]] == ["KVD101"]
    assert "KVF001" in full["answer"]["findings"][0]["do_now"]
    assert "KVD101" in brief["answer"]
    assert len(brief["answer"].encode()) <= 8000
    assert explained["answer"]["code"] == "KVD101"


@pytest.mark.parametrize("path", ["../secret.log", "/etc/hostname", "link.log"])
def test_nothing_outside_its_folder_is_read(path: str, tmp_path: Path) -> None:
    root = tmp_path / "logs"
    root.mkdir()
    (tmp_path / "secret.log").write_text("AssertionError: Mismatch in tokens to load\n")
    (root / "link.log").symlink_to(tmp_path / "secret.log")

    async def talk(client: Any) -> Any:
        return await client.call_tool("diagnose", {"paths": [path]})

    result = call(root, talk)
    assert result.is_error
    assert "is not below" in result.content[0].text
    assert "Mismatch" not in str(result.content)
