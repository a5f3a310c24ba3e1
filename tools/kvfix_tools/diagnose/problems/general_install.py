"""Libraries, imports and packages that are not there. For what no other record knows."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem, either

PROBLEMS = (
    Problem(
        code="KVD386",
        name="shared-library-not-found",
        general=True,
        severity=Severity.CRASH,
        title="A compiled module needs a library that the loader does not find.",
        shows=either("cannot open shared object file"),
        cause="The name before the colon is what is missing. It is not installed in this container, or it lies where "
        "the loader does not look: wheels keep theirs in a folder beside the package (`PACKAGE.libs`, or the package "
        "itself), and a build from source needs `make install` or LD_LIBRARY_PATH.",
        now="find / -name 'THAT.so*': if it is there, its folder into LD_LIBRARY_PATH, or ldconfig; if not: "
        "libibverbs1 librdmacm1 libnuma1 libcurl4 (apt-get install), libetcd_wrapper, libasio and libglog with pip "
        "install --force-reinstall mooncake-transfer-engine, libucp and libucs with nixl, libascendcl and libhccl by "
        "CANN's set_env.sh",
        good="an image in which `ldd MODULE.so | grep 'not found'` prints nothing",
        sure=False,
        threads=("https://github.com/kvcache-ai/Mooncake/issues/229",),
    ),
    Problem(
        code="KVD387",
        name="optional-import-failed",
        general=True,
        severity=Severity.CRASH,
        title="Code uses a name that was never imported.",
        shows=(Failed(kind="NameError", text="is not defined"),),
        cause="A module imports a package if it is there, catches or logs that it is not, and later uses it all the "
        "same: the package behind the name is not installed in this environment, or does not load. In a file that you "
        "changed it is a mistake of that change.",
        now="grep 'import NAME' in the last frame's file shows the package; python -c 'import PACKAGE' says why it "
        "does not load; then pip install it (MooncakeStore: mooncake-transfer-engine, nixl_agent: nixl)",
        good="the package in the image of every process, not of one",
        sure=False,
        threads=("https://github.com/sgl-project/sglang/issues/8668",),
    ),
    Problem(
        code="KVD388",
        name="pip-cannot-install",
        general=True,
        severity=Severity.CRASH,
        title="pip could not install a package: it finds no release that fits, or cannot build it.",
        shows=(
            *either("No matching distribution found for", "Could not find a version that satisfies the requirement"),
            *either("Failed building wheel for", "Failed to build installable wheels", "ResolutionImpossible"),
            Logged("Cannot install <packages> because these package versions have conflicting dependencies"),
        ),
        cause="`conflicting dependencies`: the first list names who asks for which release (LMCache's wheels of some "
        "releases pin torch). `No matching distribution`: no wheel for this Python, platform or index (torch of "
        "another CUDA comes from https://download.pytorch.org/whl/cu130); one that ends in manylinux_2_28 needs glibc "
        "2.28, which Ubuntu 18.04 and CentOS 7 do not have. A build fails at its own first error above, mostly a torch "
        "in pip's isolated build folder that is not the one that runs.",
        now="a conflict: vLLM first, then pip install --no-deps of the release that is built for its torch; python "
        "--version and ldd --version against the wheels on PyPI, or the image lmcache/vllm-openai on an old system; a "
        "build: pip install --no-build-isolation --no-deps --no-binary lmcache lmcache, with torch, nvcc and ninja "
        "already there",
        good="a wheel that fits: pip download --no-deps PACKAGE tells in advance",
        sure=False,
        threads=("https://github.com/LMCache/LMCache/issues/782", "https://github.com/LMCache/LMCache/issues/1185"),
    ),
    Problem(
        code="KVD392",
        name="file-not-there",
        general=True,
        severity=Severity.CRASH,
        title="A file, a folder or a program that code wants to open is not there.",
        shows=(Failed(kind="FileNotFoundError"), Failed(kind="NotADirectoryError")),
        cause="The path in the message tells which kind. A cache's chunk (.pt, .data): its folder was never made "
        "(old releases do not make it) or is not mounted, something else removed the file, or another engine or rank "
        "evicts in the same folder. A bare name (nvcc, numactl): "
        "a program that this image has not. A socket or .mmap below /tmp or /dev/shm: the process that made it has "
        "ended.",
        now="ls -ld on each folder of that path, in this container and as this user, mkdir -p what is missing; a "
        "folder of its own for each engine and rank, which no tmp cleaner sweeps; then restart",
        good="the folder on a volume that is mounted before the engine starts",
        sure=False,
        threads=("https://github.com/LMCache/LMCache/issues/227",),
    ),
    Problem(
        code="KVD1328",
        name="python-s-own-hash",
        general=True,
        severity=Severity.RISK,
        title="LMCache takes Python's own hash: this vLLM has none of the configured name.",
        shows=(Logged("Could not load '<algorithm>' from vLLM. Using builtin hash"),),
        sentence="pre_caching_hash_algorithm is {algorithm}, which this vLLM does not have",
        cause="With `builtin`, the default, it is normal: vLLM 0.11 and newer has no such function, and LMCache uses "
        "Python's. Several processes then agree only with the same PYTHONHASHSEED. It need not be what vLLM uses for "
        "its blocks.",
        now="nothing, with one process; else export PYTHONHASHSEED=0 before every vLLM process, or "
        "pre_caching_hash_algorithm: sha256_cbor (LMCache 0.4.6 or newer)",
        good="the same, in every unit file and container",
        sure=False,
        threads=("https://github.com/LMCache/LMCache/issues/2113",),
    ),
    Problem(
        code="KVD1765",
        name="pip-warns-of-a-conflict",
        general=True,
        severity=Severity.RISK,
        title="pip has installed what it was asked for, and names packages that wanted another release of it.",
        shows=either("dependency resolver does not currently take into account all the packages that are installed"),
        sure=False,
        cause="It is a warning: below it stands `Successfully installed`. Each line names a package and the release "
        "that it wants. It matters where the package is vllm, torch, lmcache or nixl, and a later import fails.",
        now="pip check; a conflict of vllm or torch: pip install vllm==<your release> again, then pip install "
        "--no-deps of the rest; of packages that you do not run: nothing",
        good="an environment for vLLM and LMCache alone",
        threads=("https://github.com/LMCache/LMCache/issues/744",),
    ),
)
