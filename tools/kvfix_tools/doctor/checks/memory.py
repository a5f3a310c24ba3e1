"""Check the memory that LMCache will allocate against the limits of the machine and the container."""

import re
from collections.abc import Iterator

from kvfix_tools.doctor.checks import Line, check, ok, problem, remedy, unchecked
from kvfix_tools.doctor.machine import GIB, gib
from kvfix_tools.doctor.setup import Setup

#: Bytes of /dev/shm that vLLM needs for messages between several processes: ten chunks of 24 MiB
#: (vllm/distributed/device_communicators/shm_broadcast.py, VLLM_MQ_MAX_CHUNK_BYTES_MB). Docker's default is 64 MiB.
_MESSAGES = 240 * 2**20
#: UCX may use RDMA if UCX_TLS is empty, lists the transports to exclude ("^"), or lists a transport over RDMA, such as
#: `ib`, `rc_x`, `ud_mlx5` or `srd`.
_RDMA = re.compile(r"|\^.*|(?:.*,)?(?:all|ib|rdma|srd|(?:rc|ud|dc|gga)(?:_\w+)?)(?::\w+)?(?:,.*)?")


def _wanted(setup: Setup) -> tuple[float, str] | None:
    """Return (bytes of host memory that LMCache will allocate, the setting with this size), or None if unknown."""
    if setup.is_server:
        given = setup.option("l1-size-gb")
        return (float(given) * GIB, f"--l1-size-gb {given}") if re.fullmatch(r"\d+(\.\d+)?", given) else None
    size = setup.number("max_local_cpu_size")
    if setup.v1 is None or size is None:
        return None
    # With MLA only the first worker stores, unless save_only_first_rank is false (local_cpu_backend.py 0.5.6:384-394).
    extra = setup.setting("extra_config")
    first_only = extra.get("save_only_first_rank", True) if isinstance(extra, dict) else True
    mla = bool(setup.model.get("kv_lora_rank")) and first_only
    engines = setup.parallel("data") * (1 if mla else setup.ranks)
    times = f" for each of {engines} workers" if engines > 1 else ""
    return size * GIB * engines, f"max_local_cpu_size {size:g}{times}"


@check("memory")
def memory(setup: Setup) -> Iterator[Line]:
    """The host memory of LMCache in all workers fits into the container's limit and the machine's memory."""
    limit, available, source = setup.machine.memory()
    wanted = _wanted(setup)
    if limit is None:
        yield unchecked("the memory of this machine cannot be read")
        return
    if wanted is None:
        yield ok(f"{source} has {gib(limit)}")
        return
    size, how = wanted
    smaller = "--l1-size-gb N, with a smaller N"
    do = smaller if how.startswith("--") else "max_local_cpu_size: a smaller value (GiB for each worker)"
    if setup.in_container:
        yield unchecked(f"{how} is {gib(size)}, but the memory of the container is unknown here")
    elif size > limit:
        yield problem(f"{how} is {gib(size)}, but {source} has only {gib(limit)}: the kernel will kill the process", do)
    elif available is not None and size > available:
        yield problem(f"{how} is {gib(size)}, but only {gib(available)} of {gib(limit)} are free now", do)
    else:
        yield ok(f"{how} is {gib(size)}; {source} has {gib(limit)}")


@check("pinned-memory")
def pinned(setup: Setup) -> Iterator[Line]:
    """The driver lets LMCache pin its host memory."""
    wanted = _wanted(setup)
    if wanted is None or wanted[0] <= 0:
        return
    if setup.machine.is_wsl():
        what = f"{wanted[1]}: under WSL 2 the driver pins little host memory (`CUDA error: invalid argument`)"
        yield problem(what, "max_local_cpu_size: 1, or --l1-size-gb 1; or use Linux without WSL")
    elif setup.machine.has_nvidia():
        yield unchecked(f"only the start of LMCache shows whether the driver can pin {gib(wanted[0])}")


@check("locked-memory")
def locked(setup: Setup) -> Iterator[Line]:
    """`ulimit -l` lets NIXL and Mooncake register buffers. CUDA's pinned memory does not count against this limit."""
    limit = setup.machine.locked_memory()
    uses = [name for name in ("nixl", "mooncake") if setup.needs(name)]
    if "nixl" in uses and not _RDMA.fullmatch(setup.environment.get("UCX_TLS", "")):
        uses.remove("nixl")
    shown = "unlimited" if limit is None else gib(limit)
    if setup.in_container:
        yield unchecked("ulimit -l of the container is unknown here", "docker run --ulimit memlock=-1")
    elif limit is not None and uses:
        what = f"ulimit -l is {shown}: {' and '.join(uses)} cannot register larger buffers for RDMA (NIXL_ERR_BACKEND)"
        yield problem(what, "ulimit -l unlimited (docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in systemd)")
    else:
        yield ok(f"ulimit -l is {shown}{'' if uses or limit is None else '; no connector registers memory for RDMA'}")


@check("shared-memory")
def shared(setup: Setup) -> Iterator[Line]:
    """/dev/shm has room for the messages between vLLM's processes, and for LMCache's L1 if --shm-name is set."""
    found = setup.machine.shared_memory()
    if setup.in_container:
        yield unchecked("/dev/shm of the container is unknown here", remedy("KVD1894"))
        return
    if found is None:
        yield unchecked("this machine has no /dev/shm")
        return
    size, free = found
    wanted, why = (_MESSAGES, "vLLM's processes exchange messages there") if setup.ranks > 1 else (0, "")
    if setup.is_server and setup.option("shm-name") and (needed := _wanted(setup)) and needed[0] > wanted:
        wanted, why = int(needed[0]), "--shm-name puts L1 there"
    if free < wanted:
        what = f"/dev/shm has {gib(free)} free of {gib(size)}, but {gib(wanted)} are needed: {why}"
        yield problem(what, remedy("KVD1894" if wanted == _MESSAGES else "KVD913"))
    else:
        yield ok(f"/dev/shm: {gib(free)} free of {gib(size)}")
