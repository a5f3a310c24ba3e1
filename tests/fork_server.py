"""Imports vLLM once, then forks for every line on stdin, runs its code and answers with one line of JSON.

With an argument: Python that is run before the first fork, e.g. to import more.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import traceback


def child(job: dict[str, str], answer_to: int, print_to: int) -> None:
    os.dup2(print_to, 2)
    os.dup2(print_to, 1)
    if job["lmcache"]:
        sys.path.insert(0, job["lmcache"])
    names: dict[str, object] = {"result": None}
    error = None
    try:
        exec(compile(job["code"], "<case>", "exec"), names)
    except BaseException:  # noqa: BLE001
        error = traceback.format_exc()
    with os.fdopen(answer_to, "w") as pipe:
        json.dump({"result": names["result"], "error": error}, pipe)
    os._exit(0)


def main() -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        import vllm.distributed.kv_transfer.kv_connector.factory
        import vllm.v1.core.sched.scheduler  # noqa: F401

        import tests.conftest  # noqa: F401  every module with a function for a fork imports it
    assert not any(name.startswith(("lmcache", "kvfix")) for name in sys.modules)
    with contextlib.redirect_stdout(sys.stderr):
        exec("".join(sys.argv[1:]), {})
    for line in sys.stdin:
        read, write = os.pipe()
        with tempfile.TemporaryFile() as printed:
            pid = os.fork()
            if pid == 0:
                os.close(read)
                child(json.loads(line), write, printed.fileno())
            os.close(write)
            with os.fdopen(read) as pipe:
                text = pipe.read()
            os.waitpid(pid, 0)
            printed.seek(0)
            answer = json.loads(text) if text else {"result": None, "error": "the case ended its process\n"}
            print(json.dumps({**answer, "printed": printed.read().decode(errors="replace")}), flush=True)


if __name__ == "__main__":
    main()
