"""A process into which tests inject code. The first argument names the work that the main thread does."""

import ctypes
import platform
import signal
import sys
import threading
import time

if sys.argv[1] == "threads":
    for _ in range(200):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
if sys.argv[1] == "busy-threads":
    for _ in range(4):
        threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(int, 1)], daemon=True).start()
if sys.argv[1] == "computes":
    import numpy

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTRAP})
    numbers = numpy.arange(1_000_000, dtype=float)
    right, wrong = float(numbers.sum()), 0
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background processes ignore SIGINT
print("ready", flush=True)
if sys.argv[1] == "c":  # keep the GIL and run no bytecode, until a line comes on stdin
    ctypes.PyDLL(None).getchar()
if sys.argv[1] == "own-lock":  # wait with FUTEX_WAIT on an address in Python's own state
    state = ctypes.c_int.in_dll(ctypes.pythonapi, "_PyRuntime")
    number = {"x86_64": 202, "aarch64": 98}[platform.machine()]
    ctypes.CDLL(None).syscall(number, ctypes.byref(state), 0, state.value, None)
if sys.argv[1] == "read":
    ctypes.CDLL(None).getchar()
if sys.argv[1] == "reads":  # two system calls, one after the other
    sys.stdin.buffer.raw.read(1)
    print("goes on", flush=True)
    sys.stdin.buffer.raw.read(2)
if sys.argv[1] == "sleep":
    time.sleep(60)
if sys.argv[1] == "lock":
    threading.Event().wait(60)
if sys.argv[1] == "computes":
    while True:
        wrong += float(numbers.sum()) != right
counted = 0
try:
    while True:
        counted += 1
        time.sleep(0.001)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.stdin.read()
