"""Chunks on local disk whose file or index is gone."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_DISK = "lmcache/v1/storage_backend/local_disk_backend.py"

PROBLEMS = (
    Problem(
        code="KVD814",
        name="disk-file-gone",
        severity=Severity.CRASH,
        title="A file of the disk cache was gone when it was to be read, and the worker dies.",
        shows=(
            Failed(kind="KeyError", within="local_disk_backend.py:load_bytes_from_disk"),
            Failed(kind="KeyError", within="local_disk_backend.py:batched_async_load_bytes_from_disk"),
            # Of a traceback that was cut before its last frame.
            Failed(kind="KeyError", within="local_disk_backend.py:get_blocking", source="load_bytes_from_disk("),
        ),
        sentence="a chunk's file was gone, its entry was dropped, and then asked for",
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.9.post1"},
        cause="read_file drops the entry of a file that is not there (or another thread evicts it meanwhile), and the "
        "caller asks for that entry next. Files vanish where two engines share one local_disk folder, or somebody "
        "cleans it up.",
        now="give every engine a local_disk folder of its own, delete nothing in it while vLLM runs, "
        "enable_async_loading: false, and restart",
        good="no release is right yet: 0.5.2 to 0.5.6 fail so only at loads of a single chunk and with "
        "enable_async_loading (LMCache pull requests 4405 and 5228 are open)",
        threads=(_LMCACHE + "issues/2420", _LMCACHE + "pull/4405", _LMCACHE + "pull/5228"),
    ),
    Problem(
        code="KVD815",
        name="disk-file-missing",
        severity=Severity.SLOW,
        title="Files that the disk cache lists are not there: their chunks are computed again.",
        shows=(Logged("File not found on disk: <path>", _DISK),),
        sentence="{path} is gone",
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.9.post1"},
        cause="Somebody else deletes them: a second engine with the same local_disk folder (the names are the same for "
        "the same model), a clean-up job, or a container's storage limit. Before LMCache 0.5.2, and in every release "
        "at loads of a single chunk or with enable_async_loading, a KeyError follows.",
        now="give every engine a local_disk folder of its own, and delete nothing in it while vLLM runs",
        good="LMCache 0.5.2 survives it at loads of several chunks without enable_async_loading; the cause is the "
        "folder, not the release",
        threads=(_LMCACHE + "issues/2420",),
    ),
    Problem(
        code="KVD471",
        name="disk-file-missing-kills",
        severity=Severity.CRASH,
        title="A chunk's file has gone from local_disk, and this old release dies at it.",
        shows=(
            Failed(kind="FileNotFoundError", within="local_disk_backend.py:load_bytes_from_disk"),
            Failed(kind="FileNotFoundError", within="local_disk_backend.py:load_disk"),
            Failed(kind="FileNotFoundError", within="local_disk_backend.py:async_load_bytes_from_disk"),
            # Of ranks whose lines are mixed: a chunk's name, in a load.
            Failed(kind="FileNotFoundError", text="'<path>@<ranks>@<rank>@<chunk>.pt'", within="start_load_kv"),
        ),
        said=(
            r"(?i)local[ _]?disk",
            r"(?i)\.pt\b|FileNotFound|(?:cache|chunk)s? files?",
            r"(?i)\b(?:was|is|are|were|got|some) (?:\w+ )?(?:lost|missing|removed|deleted|gone)|remove some",
            r"(?i)shut ?down|crash|\bdie[sd]?\b|EngineDead",
        ),
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        releases={"lmcache": "<0.3.9"},
        cause="The index of the disk cache is in memory and names a file that someone else removed: another engine or "
        "rank with the same folder that evicts, or a cleaner. From 0.3.9 on such a chunk is a miss.",
        now="a folder of its own for each engine (local_disk: file:///data/kv/engine-1/), nothing that cleans it, and "
        "restart",
        good="LMCache 0.3.9 or newer",
        threads=("https://github.com/LMCache/LMCache/issues/1313",),
    ),
)
