"""The storage of chunks: disk, remote store, and the size of the CPU cache."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvfix_tools.doctor.checks import Line, check, ok, problem, unchecked
from kvfix_tools.doctor.checks.disaggregated import bytes_per_token
from kvfix_tools.doctor.machine import GIB, gib
from kvfix_tools.doctor.setup import Setup

#: A CPU cache of fewer chunks is too small for a prompt.
_FEWEST_CHUNKS = 8


@check("local-disk")
def local_disk(setup: Setup) -> Iterator[Line]:
    """The folder of local_disk is writable, and its file system has room for max_local_disk_size."""
    given = setup.setting("local_disk")
    if setup.connector("v1") is None or not isinstance(given, str) or not given:
        return
    if setup.command and setup.command.container:
        yield unchecked("the folder of local_disk is in the container, so kvfix cannot check it")
        return
    folder = Path(given.removeprefix("file://"))
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        do = "local_disk: a folder that vLLM's user may write"
        yield problem(f"local_disk is {folder}, but {there} cannot be written", do)
        return
    found, wanted = os.statvfs(there), (setup.number("max_local_disk_size") or 0) * GIB * setup.ranks
    free = found.f_bavail * found.f_frsize
    if free < wanted:
        yield problem(
            f"the file system of local_disk has {gib(free)} free, but all workers together need {gib(wanted)}",
            f"max_local_disk_size: {free / GIB / setup.ranks:.2f}, or less (GiB for each worker); or free space",
        )
    else:
        yield ok(f"local_disk {folder} is writable, and {gib(free)} are free")


@check("remote-scheme")
def remote_scheme(setup: Setup) -> Iterator[Line]:
    """The installed LMCache has a connector for the scheme of remote_url."""
    scheme, separator, _ = str(setup.setting("remote_url") or "").partition("://")
    folder = setup.lmcache.folder / "v1/storage_backend/connector" if setup.lmcache else None
    if setup.connector("v1") is None or not separator or folder is None or not folder.is_dir():
        return
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in folder.glob("*.py"))
    known = {each for text in texts for each in re.findall(r"[\"']([a-z0-9-]+)://", text)} - {"http", "https"}
    if known and scheme not in known:
        do = "remote_url: redis://HOST:PORT, or lm://HOST:PORT"
        yield problem(f"LMCache has no connector for remote_url {scheme}://", do)


@check("offload-size")
def offload_size(setup: Setup) -> Iterator[Line]:
    """OffloadingConnector has a setting for the size of its CPU cache, also as a child of MultiConnector."""
    for each in setup.connectors:
        sizes = {"cpu_bytes_to_use", "num_cpu_blocks", "spec_name"}
        if each.name == "OffloadingConnector" and not sizes & each.extra.keys():
            yield problem(
                "OffloadingConnector has no cpu_bytes_to_use, so vLLM does not start",
                '"kv_connector_extra_config": {"cpu_bytes_to_use": 10737418240}',
            )


@check("cpu-cache-size")
def cpu_cache_size(setup: Setup) -> Iterator[Line]:
    """The CPU cache of LMCache holds at least eight chunks of the model."""
    size, chunk, of_token = setup.number("max_local_cpu_size"), setup.number("chunk_size"), bytes_per_token(setup)
    if setup.connector("v1") is None or not (size and chunk and of_token):
        return
    held = size * GIB / (chunk * of_token)
    if held < _FEWEST_CHUNKS:
        yield problem(
            f"max_local_cpu_size {size:g} holds {held:.1f} chunks of {chunk:g} tokens, which is too few for a prompt",
            f"max_local_cpu_size: {64 * size / held:.2g}, or more (GiB for each worker)",
        )
