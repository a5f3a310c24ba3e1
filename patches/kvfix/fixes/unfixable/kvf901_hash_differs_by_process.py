"""No process finds the chunks of another process: the keys use Python's hash, which differs between processes.

Symptom: No request hits chunks of another process or machine, or chunks from before a restart, although LMCache has
stored them. With tensor parallelism LMCache logs `Lookup results (number of hit tokens) differ across (TP and PP)
ranks`. The log may also have one of these lines:

- `Using builtin hash without PYTHONHASHSEED set`
- `Centralized cache sharing detected but PYTHONHASHSEED not set`
- `P/D Disaggregation detected but PYTHONHASHSEED not set`

Cause: `pre_caching_hash_algorithm` is `builtin` by default (0.5.6 config.py:133), and Python salts the hash of strings
and bytes in each process. Up to 0.3.15 LMCache also hashes None. On Python 3.11 and earlier, the hash of None is a
memory address, which differs by process even with a fixed seed. Python sets the seed at its start, before kvfix runs.

Workaround: Set PYTHONHASHSEED=0 in the environment of every vLLM and LMCache process. Or set
`pre_caching_hash_algorithm: sha256_cbor` in each LMCache's configuration. Without a shared cache, no setting is needed.
- Upstream: https://github.com/LMCache/LMCache/issues/2136, https://github.com/LMCache/LMCache/issues/2511
- Remove when: LMCache's default hash is the same in all processes.
"""

import os

from kvfix.fixes.api import TOKEN_DATABASE, Fix


def harmless() -> str:
    """Return a text if the hash seed of this process and its children is set, else ""."""
    seed = os.environ.get("PYTHONHASHSEED", "random")
    return f"PYTHONHASHSEED={seed} is set here; it must be the same in every process" if seed.isdigit() else ""


FIX = Fix(
    TOKEN_DATABASE.target("__init__", broken=">=0.3.9", fix=None),
    effect="lost hits",
    evidence={"KVD304": "", "KVD305": ""},
    no_patch={"lmcache": "Only LMCache can change its default hash: with a new hash, LMCache finds no stored chunk"},
    harmless=harmless,
)
