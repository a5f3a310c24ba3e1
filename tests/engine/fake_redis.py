"""A small Redis server for LMCache that keeps values in memory. The server can refuse commands or cut off answers."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_HELLO = b"%3\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n7.4.0\r\n$5\r\nproto\r\n:3\r\n"
_READS, _WRITES = ("EXISTS", "GET"), ("SET",)
#: For each fault, the refused commands and the error text of Redis 7.4 (server.c).
ANSWERS = {
    "oom": (_WRITES, b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"),
    "noauth": (("PING", *_READS, *_WRITES), b"-NOAUTH Authentication required.\r\n"),
    "loading": (("PING", *_READS, *_WRITES), b"-LOADING Redis is loading the dataset in memory\r\n"),
    "readonly": (_WRITES, b"-READONLY You can't write against a read only replica.\r\n"),
    "misconf": (
        ("PING", *_WRITES),
        b"-MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk. Commands "
        b"that may modify the data set are disabled, because this instance is configured to report errors during "
        b"writes if RDB snapshotting fails (stop-writes-on-bgsave-error option). Please check the Redis logs for "
        b"details about the RDB error.\r\n",
    ),
    "noperm": (_WRITES, b"-NOPERM User default has no permissions to run the 'set' command\r\n"),
}


class Redis(socketserver.ThreadingTCPServer):
    """A server. fault: a key of ANSWERS, or "silent" (no answer), "closes" (cuts off values), or "" (no fault)."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.fault = ""
        self.values: dict[bytes, bytes] = {}
        self.ended = threading.Event()


class Connection(socketserver.StreamRequestHandler):
    server: Redis

    def handle(self) -> None:
        while (words := self._command()) and not self.server.ended.is_set():
            name = words[0].decode().upper()
            refused, answer = ANSWERS.get(self.server.fault, ((), b""))
            if self.server.fault == "silent":
                self.server.ended.wait()
            elif name in refused:
                self.wfile.write(answer)
            elif self.server.fault == "closes" and name == "GET" and words[1] in self.server.values:
                self.wfile.write(b"$100000\r\nabc")
                return
            else:
                self.wfile.write(self._answer(name, words[1:]))

    def _command(self) -> list[bytes]:
        first = self.rfile.readline()
        if not first.startswith(b"*"):  # an inline command: PING
            return first.split()
        words = []
        for _ in range(int(first[1:])):
            words.append(self.rfile.read(int(self.rfile.readline()[1:])))
            self.rfile.readline()
        return words

    def _answer(self, name: str, words: list[bytes]) -> bytes:
        values = self.server.values
        if name == "HELLO":
            return _HELLO
        if name == "EXISTS":
            return b":%d\r\n" % sum(word in values for word in words)
        if name == "GET":
            return b"$%d\r\n%b\r\n" % (len(values[words[0]]), values[words[0]]) if words[0] in values else b"_\r\n"
        if name == "INFO":
            role = b"role:slave" if self.server.fault == "readonly" else b"role:master"
            return b"$%d\r\n%b\r\n" % (len(role), role)
        if name == "SET":
            values[words[0]] = words[1]
        elif name not in ("CLIENT", "SELECT"):
            return b"+PONG\r\n" if name == "PING" else b"-ERR unknown command\r\n"
        return b"+OK\r\n"


@contextmanager
def running(fault: str = "") -> Iterator[Redis]:
    with Redis() as server:
        server.fault = fault
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
