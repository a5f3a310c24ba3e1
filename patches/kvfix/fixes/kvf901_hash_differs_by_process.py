"""Keys are made with Python's own hash, which differs from process to process: what one stores no other finds.

## Symptom
Never a hit across processes or machines, or after a restart, although all is stored; with tensor parallelism `Lookup
results (number of hit tokens) differ across (TP and PP) ranks`. The log may say `Using builtin hash without
PYTHONHASHSEED set`, `Centralized cache sharing detected but PYTHONHASHSEED not set` or `P/D Disaggregation detected but
PYTHONHASHSEED not set`.

## Cause
`pre_caching_hash_algorithm` is `builtin` unless it is set (0.5.6 config.py:133), and Python salts the hash of strings
and bytes in each process. To 0.3.15 None is hashed too, which on Python 3.11 and earlier is an address: a fixed seed is
not enough there. The seed is fixed when the interpreter starts, before anything of kvfix runs.

## Workaround
Set PYTHONHASHSEED=0 in the environment of every vLLM and LMCache process, or `pre_caching_hash_algorithm: sha256_cbor`
in LMCache's configuration, everywhere the same. One process that shares its cache with no other needs neither.

## Releases
LMCache 0.3.9 to 0.5.6.

## Upstream
https://github.com/LMCache/LMCache/issues/2136, https://github.com/LMCache/LMCache/issues/2511

## Remove when
The default is an algorithm that is the same everywhere.
"""

from __future__ import annotations

import os

from kvfix import probe
from kvfix.fix import Fix, Patch


def harmless() -> str:
    """The seed of this process and those that it starts."""
    seed = os.environ.get("PYTHONHASHSEED", "random")
    return f"PYTHONHASHSEED={seed} is set here; it must be the same in every process" if seed.isdigit() else ""


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch("lmcache", "lmcache.v1.token_database", "TokenDatabase.__init__", ">=0.3.9", probe.cannot_tell, None),
    ),
    harmless=harmless,
)
