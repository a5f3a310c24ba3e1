"""Check the storage of chunks: the disk, the remote store, and the size of the CPU cache."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvfix_tools.doctor.checks import Line, check, ok, problem, remedy, unchecked
from kvfix_tools.doctor.checks.disaggregated import bytes_per_token
from kvfix_tools.doctor.machine import GIB, gib
from kvfix_tools.doctor.setup import Setup


@check("local-disk")
def local_disk(setup: Setup) -> Iterator[Line]:
    """The folder of local_disk is writable, and its file system has room for max_local_disk_size."""
    given = setup.setting("local_disk")
    if setup.v1 is None or not isinstance(given, str) or not given:
        return
    if setup.in_container:
        yield unchecked("the folder of local_disk is in the container, so kvfix cannot check it")
        return
    folder = Path(given.removeprefix("file://"))
    there = _nearest_folder(folder)
    if not _is_writable(there):
        do = "local_disk: a folder that vLLM's user may write"
        yield problem(f"local_disk is {folder}, but {there} cannot be written", do)
        return
    found, wanted = os.statvfs(there), (setup.number("max_local_disk_size") or 0) * GIB * setup.ranks
    free = found.f_bavail * found.f_frsize
    if free < wanted:
        what = f"the file system of local_disk has {gib(free)} free, but all workers together need {gib(wanted)}"
        do = f"max_local_disk_size: {free / GIB / setup.ranks:.2f}, or less (GiB for each worker); or make space free"
        yield problem(what, do)
    else:
        yield ok(f"local_disk {folder} is writable, and {gib(free)} are free")


def _nearest_folder(folder: Path) -> Path:
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())


def _is_writable(there: Path) -> bool:
    """Return True if kvfix may write into this folder. Return False for /sys and /proc, which have no blocks."""
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK) and os.statvfs(there).f_blocks > 0


@check("l2-adapter")
def l2_adapter(setup: Setup) -> Iterator[Line]:
    """The --l2-adapter of an `lmcache server` command is JSON of a known type, and its folder can be written."""
    if not setup.is_server or not setup.has_option("l2-adapter"):
        return
    try:
        adapter = json.loads(setup.option("l2-adapter"))
    except ValueError as error:
        yield problem(f"--l2-adapter is not JSON: {error}", remedy("KVD933"))
        return
    pattern = r"register_l2_adapter_type\(\s*[\"'](\w+)"
    known = setup.lmcache.found("v1/distributed/l2_adapters", pattern) if setup.lmcache else set()
    kind, path = (adapter.get("type"), adapter.get("base_path")) if isinstance(adapter, dict) else (None, None)
    if known and kind not in known:
        yield problem(f"--l2-adapter has no type {kind!r}", " | ".join(sorted(known)))
    elif isinstance(path, str) and not _is_writable(_nearest_folder(Path(path))):
        yield problem(f"base_path {path} of --l2-adapter cannot be written", "a folder that the server may write")
    else:
        yield ok(f"--l2-adapter {kind}")


@check("remote-scheme")
def remote_scheme(setup: Setup) -> Iterator[Line]:
    """The installed LMCache has a connector for the scheme of remote_url."""
    scheme, separator, _ = str(setup.setting("remote_url") or "").partition("://")
    if setup.v1 is None or not separator or setup.lmcache is None:
        return
    known = setup.lmcache.found("v1/storage_backend/connector", r"[\"']([a-z0-9-]+)://") - {"http", "https"}
    if known and scheme not in known:
        do = "remote_url: redis://HOST:PORT, or lm://HOST:PORT"
        yield problem(f"LMCache has no connector for remote_url {scheme}://", do)


@check("offload-size")
def offload_size(setup: Setup) -> Iterator[Line]:
    """OffloadingConnector, alone or in a MultiConnector, has a known spec_name, and its CPU cache fits into the memory.
    The connector's block_size is a multiple of vLLM's block size."""
    limit, _, source = setup.machine.memory()
    for each in setup.connectors:
        if each.name != "OffloadingConnector":
            continue
        given, key = each.extra.get("cpu_bytes_to_use"), remedy("KVD611")
        size = int(str(given).removesuffix(".0")) if str(given).removesuffix(".0").isdigit() else None
        if not given and not {"num_cpu_blocks", "spec_name"} & each.extra.keys():
            yield problem("OffloadingConnector has no cpu_bytes_to_use, so vLLM does not start", key)
        elif given and size is None:
            yield problem(f"cpu_bytes_to_use is {given!r}, which is no number of bytes", key)
        elif size and limit and size > limit:
            yield problem(f"cpu_bytes_to_use is {gib(size)}; {source} has {gib(limit)}", "a smaller cpu_bytes_to_use")
        # kv_offload/factory.py has the names of specs. offloading/config.py 0.32.0:126 checks block_size.
        specs = set(re.findall(r"register_spec\(\s*[\"'](\w+)", setup.packages.text("vllm.v1.kv_offload.factory")))
        spec, chunk = each.extra.get("spec_name"), str(each.extra.get("block_size", ""))
        if specs and spec and spec not in specs and "spec_module_path" not in each.extra:
            yield problem(f"vLLM has no spec_name {spec!r}", " | ".join(sorted(specs)))
        block = setup.option("block-size")
        if chunk.isdigit() and block.isdigit() and int(chunk) % int(block):
            what = f"block_size {chunk} of OffloadingConnector is no multiple of vLLM's block size {block}"
            yield problem(what, f'"block_size": {-(-int(chunk) // int(block)) * int(block)}')


@check("cpu-cache-size")
def cpu_cache_size(setup: Setup) -> Iterator[Line]:
    """The CPU cache of LMCache has a size, and holds at least eight chunks of the model."""
    size, chunk, of_token = setup.number("max_local_cpu_size"), setup.number("chunk_size"), bytes_per_token(setup)
    if setup.v1 is None:
        return
    if size is not None and size <= 0 and not setup.on("enable_pd"):
        yield problem(f"max_local_cpu_size is {size:g}: LMCache does not start without memory", remedy("KVD1900"))
    if not (size and chunk and of_token):
        return
    held = size * GIB / (chunk * of_token)
    if held < 8:
        what = f"max_local_cpu_size {size:g} holds {held:.1f} chunks of {chunk:g} tokens, which is too few for a prompt"
        yield problem(what, f"max_local_cpu_size: {64 * size / held:.2g}, or more (GiB for each worker)")
