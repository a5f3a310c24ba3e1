"""What Docker or Kubernetes says when it cannot even start the program in vLLM's or LMCache's image."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

PROBLEMS = (
    Problem(
        code="KVD901",
        name="program-not-in-the-image",
        severity=Severity.CRASH,
        title="The container does not start: its first program is not where the image is looked through.",
        shows=(
            Logged('exec: "<program>": executable file not found in $PATH'),
            Logged('exec: \\"<program>\\": executable file not found in $PATH'),
            Logged('exec: "<program>": stat <path>: no such file or directory'),
            Logged('("<program>": executable file not found in $PATH'),
            Logged("executable file `<program>` not found in $PATH"),
        ),
        said=(
            r"lmcache/(?:vllm-openai|standalone)",
            r"(?i)\bno (?:torch|lmcache|vllm|python)\b",
            r"(?i)image|container",
        ),
        sentence="the image has no {program} on its PATH",
        cause="An `entrypoint` (docker) or `command` (Kubernetes) of one's own replaces the image's. vLLM and LMCache "
        "stand in the image's virtual environment (lmcache/vllm-openai, lmcache/standalone: /opt/venv/bin), which an "
        "own shell or program does not have on its PATH. A whole command line given as one word is looked for as one "
        "program.",
        now="take `entrypoint` out and give the model and the options as `command` (Kubernetes: `args`); or the whole "
        "path, word by word: [/opt/venv/bin/vllm, serve, MODEL], [/opt/venv/bin/lmcache, server]. docker run --rm "
        "--entrypoint sh IMAGE -c 'ls /opt/venv/bin' shows what is there",
        good="keep it so: the set-up was wrong, and no release changes that",
        threads=(
            "https://github.com/LMCache/LMCache/issues/679",
            "https://github.com/LMCache/LMCache/issues/906",
            "https://github.com/vllm-project/production-stack/issues/454",
        ),
    ),
    Problem(
        code="KVD1686",
        name="numba-has-no-folder-to-cache-in",
        severity=Severity.CRASH,
        title="numba finds no folder that this user may write, and LMCache cannot be imported.",
        shows=(
            Failed(kind="RuntimeError", text="cannot cache function '<function>': no locator available for file"),
            Logged("cannot cache function 'rolling_hash_windows_numba': no locator available"),
        ),
        sentence="numba cannot cache a compiled function: no locator available",
        cause="The server's token_hasher.py compiles with `@njit(cache=True)` (LMCache 0.4.1 to 0.5.6). numba keeps "
        "the result beside that file, or below the user's home: a user other than root in a container may write "
        "neither.",
        now="NUMBA_CACHE_DIR=/tmp/numba in the environment (docker run -e NUMBA_CACHE_DIR=/tmp/numba), or a HOME that "
        "this user may write",
        good="the same in the image; no release of LMCache changes that (0.5.6)",
        threads=("https://github.com/LMCache/LMCache/issues/4597",),
    ),
)
