"""Failures of any code that the machine explains: memory, files, addresses, peers. For what no other record knows."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Failed, Problem, either

_PEER = "The sentence names the code that called: a store's client, LMCache's server, a NIXL or Mooncake side channel."

PROBLEMS = (
    Problem(
        code="KVD215",
        name="gpu-memory-full",
        general=True,
        severity=Severity.CRASH,
        title="The GPU has no memory free for what was asked.",
        shows=(
            *either("CUDA out of memory", "CUDA error: out of memory", "NPU out of memory"),
            *either("HIP out of memory", "XPU out of memory", "CUDA_ERROR_OUT_OF_MEMORY"),
            *either("cudaErrorMemoryAllocation", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED"),
        ),
        cause="vLLM takes --gpu-memory-utilization of the GPU when it starts. All that comes later has to fit into the "
        "rest: a connector's buffers, NCCL, CUDA graphs, LoRA. The message says how much was asked and free, and what "
        "this process has; the total less these two is what others hold: an engine that did not end, or an LMCache "
        "server, which keeps a dead worker's for 2 minutes or more. The frames say who asked.",
        now="nvidia-smi: end other processes on this GPU (restart an LMCache server that holds GBs). Lower "
        "--gpu-memory-utilization by what was asked of the GPU's total (2 GiB of 80: 0.03), or "
        "--max-num-batched-tokens",
        good="a --gpu-memory-utilization that leaves room for the connector's buffers",
    ),
    Problem(
        code="KVD216",
        name="gpu-taken-before-the-start",
        general=True,
        severity=Severity.CRASH,
        title="The GPU has less memory free at the start than --gpu-memory-utilization asks for.",
        shows=either("on startup is less than desired GPU memory utilization"),
        cause="Another process has a part of the GPU: an engine that did not end (its workers outlive a killed "
        "parent), an LMCache server (it keeps a dead worker's memory for 2 minutes, or an hour), a second engine.",
        now="nvidia-smi: end what remained of the last start; else --gpu-memory-utilization below what is free of the "
        "total, which the message names",
        good="one engine per GPU, or shares that add up to less than 1",
    ),
    Problem(
        code="KVD217",
        name="no-gpu-memory-for-kv",
        general=True,
        severity=Severity.CRASH,
        title="Weights and activations leave no GPU memory for the KV cache.",
        shows=either("No available memory for the cache blocks"),
        cause="vLLM measures the weights and one largest step, and gives the rest of --gpu-memory-utilization to the "
        "KV cache; nothing was left. A larger CPU cache of a connector does not help: KV has to be in the GPU to be "
        "used.",
        now="--gpu-memory-utilization 0.95, or fewer --max-num-batched-tokens, --max-num-seqs, --enforce-eager, or "
        "more ranks (--tensor-parallel-size)",
        good="a smaller model or dtype, or more GPUs",
    ),
    Problem(
        code="KVD218",
        name="host-memory-full",
        general=True,
        severity=Severity.CRASH,
        title="The machine or the container has no host memory for what was asked.",
        shows=(
            Failed(kind="MemoryError"),
            *either("[Errno 12]", "Cannot allocate memory", "can't allocate memory", "std::bad_alloc"),
            Died("Cannot allocate memory"),
            Died("std::bad_alloc"),
        ),
        cause="The cache in host memory (max_local_cpu_size in GB, for each rank; --l1-size-gb of a server; "
        "--kv-offloading-size in GiB) and what vLLM needs do not fit: into the machine, the container's limit, "
        "or `ulimit -l` if the memory is pinned. dmesg and the container's events say which.",
        now="max_local_cpu_size (or --l1-size-gb, --kv-offloading-size) lower; `kvfix doctor -- vllm serve ...` does "
        "the sum against the limits",
        good="a larger memory limit of the container, or a smaller cache",
        sure=False,
    ),
    Problem(
        code="KVD219",
        name="too-many-open-files",
        general=True,
        severity=Severity.CRASH,
        title="The process has as many open files and sockets as it may have.",
        shows=either("[Errno 24]", "Too many open files"),
        cause="Each connection, chunk on disk that is read, and memory region of shared memory is one. `ls "
        "/proc/PID/fd | wc -l` near `ulimit -n` proves it; a number that only grows is a leak.",
        now="ulimit -n 1048576 before the start (docker run --ulimit nofile=1048576:1048576)",
        good="the limit in the unit or the container's specification",
    ),
    Problem(
        code="KVD220",
        name="port-is-taken",
        general=True,
        severity=Severity.CRASH,
        title="Another process listens at the address already.",
        shows=(*either("Address already in use", "address already in use"), Failed(text="[Errno 98]")),
        cause="An engine from before still runs (workers outlive a killed parent), or two ranks, engines or servers "
        "of this machine were given the same port.",
        now="ss -ltnp | grep PORT: end that process, or give this one another port",
        good="ports of their own for each engine, as far apart as it has ranks",
    ),
    Problem(
        code="KVD221",
        name="address-not-of-this-machine",
        general=True,
        severity=Severity.CRASH,
        title="The process was given an address that this machine or container does not have.",
        shows=either("Cannot assign requested address", "No such device (addr="),
        cause="A server can bind only to an address of its own network namespace: a pod's own address, or 0.0.0.0; "
        "not that of a service, of the node or of the peer.",
        now="`ip addr` in the container names what it has; host settings (VLLM_NIXL_SIDE_CHANNEL_HOST, VLLM_HOST_IP, "
        "--host) to one of these",
        good="the pod's own address from the downward API (status.podIP)",
    ),
    Problem(
        code="KVD222",
        name="peer-refuses",
        general=True,
        severity=Severity.CRASH,
        title="Where the process connects to, none listens.",
        shows=either(
            "Connection refused",
            "[Errno 111]",
            "Error 111 connecting",
            "Connect call failed",
            "All connection attempts failed",
            "Max retries exceeded with url",
        ),
        cause=f"{_PEER} It has not started yet, has died, listens at another port, or only at 127.0.0.1 of another "
        "container.",
        now="ss -ltnp on the peer's machine: is it there, and at which address? Its own log says why not. Start it "
        "first, then this process",
        good="a readiness probe of the peer before the engine starts",
        sure=False,
    ),
    Problem(
        code="KVD223",
        name="peer-unreachable",
        general=True,
        severity=Severity.CRASH,
        title="There is no way to the peer's address from this machine or container.",
        shows=either(
            "No route to host",
            "Network is unreachable",
            "[Errno 113]",
            "[Errno 101]",
            "Name or service not known",
            "Temporary failure in name resolution",
            "nodename nor servname",
            "[Errno -2]",
            "[Errno -3]",
        ),
        cause=f"{_PEER} The name does not resolve in this container, or a network policy or a missing route is in "
        "between.",
        now="in this container: getent hosts NAME, then nc -vz HOST PORT; correct the name, or use the address",
        good="a name that resolves in every pod, and a network policy that allows the port",
    ),
    Problem(
        code="KVD224",
        name="peer-ended-the-connection",
        general=True,
        severity=Severity.CRASH,
        title="The peer ended the connection in the middle of an exchange.",
        shows=(
            *either("Connection reset by peer", "[Errno 104]", "Server disconnected", "Connection closed by server"),
            Failed(kind="ConnectionResetError"),
            Failed(kind="IncompleteReadError"),
            Failed(kind="RemoteDisconnected"),
            Failed(kind="ServerDisconnectedError"),
        ),
        cause=f"{_PEER} It died or restarted, or something in between (a load balancer, a proxy) closes idle "
        "connections. The peer's log at that second decides.",
        now="the peer's log at this time; if it runs, start this process again: it connects anew",
        good="no proxy between the two, and keep-alive where the client has a setting for it",
        sure=False,
    ),
    Problem(
        code="KVD225",
        name="answer-timed-out",
        general=True,
        severity=Severity.CRASH,
        title="The peer did not answer in time.",
        shows=(
            *either("[Errno 110]", "Connection timed out", "Read timed out", "Timeout reading from"),
            Failed(kind="TimeoutError"),
            Failed(kind="ReadTimeout"),
            Failed(kind="ConnectTimeout"),
            Failed(kind="ConnectTimeoutError"),
            Failed(kind="ReadTimeoutError"),
            Failed(kind="Again", text="Resource temporarily unavailable"),
        ),
        cause=f"{_PEER} It is overloaded or hangs, or packets are dropped on the way (a firewall drops, a closed port "
        "refuses). If it hangs, its stacks decide.",
        now="nc -vz HOST PORT from this container; if it connects: kvfix look PID of the peer, or py-spy dump --pid "
        "PID; if not: the firewall",
        good="the peer sized for this load; a longer timeout only where it is merely slow",
        sure=False,
    ),
    Problem(
        code="KVD226",
        name="certificate-refused",
        general=True,
        severity=Severity.CRASH,
        title="The certificate of the peer is not accepted.",
        shows=either("CERTIFICATE_VERIFY_FAILED", "certificate verify failed", "SSL: WRONG_VERSION_NUMBER"),
        cause="The certificate is of an authority that this container does not know, of another name, or out of date; "
        "WRONG_VERSION_NUMBER: the peer speaks no TLS at this port.",
        now="SSL_CERT_FILE=/path/of/the/authority.pem (AWS_CA_BUNDLE for S3); or http:// where the peer has no TLS",
        good="the authority's certificate in the image",
    ),
    Problem(
        code="KVD227",
        name="not-allowed-to-use-the-file",
        general=True,
        severity=Severity.CRASH,
        title="The user of the process may not read or write this file or folder.",
        shows=either(
            "Permission denied: '<path>'",
            "[Errno 13] Permission denied",
            "Read-only file system",
            "[Errno 1] Operation not permitted",
        ),
        cause="The folder belongs to another user (a volume of root, a cache made by another container), or is "
        "mounted read-only.",
        now="ls -ld on the path, id in the container: chown it, or securityContext.fsGroup; or name another folder",
        good="a volume that the container's user owns",
    ),
    Problem(
        code="KVD228",
        name="file-is-missing",
        general=True,
        severity=Severity.CRASH,
        title="A file or folder that the process needs is not there.",
        shows=either("No such file or directory: '<path>'", "[Errno 2] No such file or directory"),
        cause="The path is wrong in this container, its volume is not mounted, or someone has removed it while the "
        "process used it (another engine with the same folder, a cleaner of /tmp or /dev/shm). A command that is "
        "missing, such as gcc, nvcc or ninja, shows in the same way.",
        now="ls on the path in this container; mount the volume, or correct the setting that names it",
        good="a folder of its own for each engine; the tool in the image, if it is a command",
        sure=False,
    ),
    Problem(
        code="KVD229",
        name="file-system-fails",
        general=True,
        severity=Severity.CRASH,
        title="The file system refused to read or write.",
        shows=either(
            "[Errno 5]",
            "[Errno 116]",
            "Stale file handle",
            "[Errno 122]",
            "Disk quota exceeded",
            "[Errno 27]",
            "[Errno 107]",
        ),
        cause="The disk or the network file system below this path has failed, was mounted anew, or its quota is used "
        "up. No setting of vLLM or LMCache causes it.",
        now="dmesg | tail, df -h and mount for the path; keep KV on a local disk until it is sound: it can be computed "
        "again",
        good="a sound disk, or a quota that fits max_local_disk_size",
    ),
    Problem(
        code="KVD230",
        name="no-more-threads",
        general=True,
        severity=Severity.CRASH,
        title="The process may start no more threads.",
        shows=either("can't start new thread", "pthread_create failed", "(os error 11)"),
        cause="The container's limit of processes (pids.max) or `ulimit -u` is reached: OpenMP, UCX and gRPC start "
        "one for each core.",
        now="OMP_NUM_THREADS=1, and --pids-limit -1 (docker run) or a larger podPidsLimit (kubelet)",
        good="a limit that counts ranks times threads",
    ),
    Problem(
        code="KVD254",
        name="peer-denies-access",
        general=True,
        severity=Severity.CRASH,
        title="A store or a peer was reached, and denies access.",
        shows=either(
            "(403)",
            "(401)",
            "AccessDenied",
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "ExpiredToken",
            "403 Forbidden",
            "401 Unauthorized",
            "NOAUTH",
            "WRONGPASS",
        ),
        cause="The credentials are missing in this process (workers and the LMCache server are processes of their "
        "own), have expired, or do not allow this bucket, path or command.",
        now="the same call by hand in this container (aws s3 ls, redis-cli -a ... ping); hand the credentials to every "
        "process, not only to vLLM",
        good="credentials that do not expire (a role of the service account)",
    ),
)
