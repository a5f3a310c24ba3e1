"""A stand-in for vLLM's HTTP server: two caches of prompts, and log probabilities drawn from the prompt. No model.

It shows what `kvfix verify` does with servers that refuse, hide or end. Real engines: tests/verify/trials.py.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BLOCK, CHUNK = 16, 64


def never(prompt: list[int], hit: int, together: int) -> bool:
    return False


@dataclass
class Behaviour:
    """The behaviour of the fake server.

    - noise: deviation of a log probability between two computations
    - wrong: returns True for a wrong answer. Arguments: prompt, its tokens from the connector, and requests since the
      last read of /metrics, which is read before and after each request that is sent alone.
    - counts: /metrics counts the requests
    - keeps: number of prompts that the connector can keep
    - others: each request comes together with a request of another client
    - spreads_nan: the first answer with a hit is NaN, and so is every third later answer
    - missing: paths that return 404
    - ends_after: number of answers until the connection ends in the middle of an answer
    """

    noise: float = 0.0
    wrong: Callable[[list[int], int, int], bool] = never
    keeps: int = 1 << 30
    others: bool = False
    spreads_nan: bool = False
    counts: bool = True
    connector: bool = True
    stores: bool = True
    missing: tuple[str, ...] = ()
    key: str = ""
    ends_after: int = 1 << 30
    blocks: int = 1000
    length: int = 4096
    vocabulary: int = 1 << 16
    models: tuple[tuple[str, str | None], ...] = (("tiny", None),)
    adapters_share: bool = False
    prefix_caching: bool = True


@dataclass
class Engine:
    behaviour: Behaviour
    gpu: list[tuple[str, list[int]]] = field(default_factory=list)
    external: list[tuple[str, list[int]]] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    drawn: random.Random = field(default_factory=lambda: random.Random(0))
    lock: threading.Lock = field(default_factory=threading.Lock)
    together: int = 0
    since_nan: int = -1
    paths: list[str] = field(default_factory=list)

    def answer(self, model: str, prompt: list[int], count: int) -> list[dict[str, float | None]]:
        with self.lock:
            self.together += 1
            cached = min(longest(self.gpu, model, prompt), len(prompt) - 1) if self.behaviour.prefix_caching else 0
            here = cached // BLOCK * BLOCK
            there = "" if self.behaviour.adapters_share else model
            stored = longest(self.external, there, prompt) // CHUNK * CHUNK if self.behaviour.connector else 0
            hit = max(0, min(stored, len(prompt) - 1) - here)
            self.counts["external_prefix_cache_queries"] += (len(prompt) - here) * self.behaviour.connector
            self.counts["external_prefix_cache_hits"] += hit
            self.counts["request_success"] += 1 + self.behaviour.others
            self.gpu = [each for each in self.gpu if each != (model, prompt)]  # the blocks of a prompt are there once
            self.gpu.append((model, prompt))
            while sum(len(one) for _, one in self.gpu) > self.behaviour.blocks * BLOCK:
                del self.gpu[0]
            if self.behaviour.stores:
                self.external.append((there, prompt))
                del self.external[: -self.behaviour.keeps]
            wrong = hit > 0 and self.behaviour.wrong(prompt, hit, self.together)
            if self.behaviour.spreads_nan and (hit > 0 or self.since_nan >= 0):
                self.since_nan += 1
                if self.since_nan % 3 == 0:
                    return [dict.fromkeys(f"token_id:{n}" for n in range(5))] * count
            seed = hashlib.sha256(f"{model} {prompt} {wrong}".encode()).digest()
            values, noise = random.Random(seed), self.behaviour.noise
            drawn = self.drawn.gauss
            return [
                {f"token_id:{n}": -1.0 - 5 * values.random() + drawn(0, noise) for n in range(5)} for _ in range(count)
            ]

    def metrics(self) -> str:
        self.together = 0
        counts = self.counts if self.behaviour.counts else dict.fromkeys(self.counts, 0.0)
        lines = [f'vllm:{name}_total{{engine="0"}} {value}' for name, value in counts.items()]
        info = f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{self.behaviour.blocks}"}} 1.0'
        return "\n".join([*lines, info, ""])


NAMES = (
    "request_success", "external_prefix_cache_queries", "external_prefix_cache_hits", "prefix_cache_hits",
    "num_preemptions",
)  # fmt: skip


def longest(cache: list[tuple[str, list[int]]], model: str, prompt: list[int]) -> int:
    """Tokens of the prompt that are cached."""
    most = 0
    for owner, other in cache:
        if owner == model and other[0] == prompt[0]:
            same = next((at for at, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), None)
            most = max(most, min(len(prompt), len(other)) if same is None else same)
    return most


@contextmanager
def served(behaviour: Behaviour) -> Iterator[tuple[str, Engine]]:
    engine = Engine(behaviour)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def reply(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or "null")
            engine.paths.append(self.path)
            if behaviour.key and self.headers.get("Authorization") != f"Bearer {behaviour.key}":
                return self.reply(401, '{"error": "Unauthorized"}')
            if self.path in behaviour.missing:
                return self.reply(404, '{"detail": "Not Found"}')
            answers: dict[str, Callable[[], str]] = {
                "/v1/models": lambda: json.dumps(
                    {
                        "data": [
                            {"id": name, "parent": of, "max_model_len": None if of else behaviour.length}
                            for name, of in behaviour.models
                        ]
                    }
                ),
                "/version": lambda: '{"version": "0.32.0"}',
                "/metrics": engine.metrics,
                "/tokenize": lambda: json.dumps(
                    {"tokens": [each % behaviour.vocabulary for each in words(body["prompt"])]}
                ),
                "/reset_prefix_cache": reset,
            }
            if self.path in answers:
                return self.reply(200, answers[self.path]())
            return self.stream(body)

        do_POST = do_GET

        def stream(self, body: dict[str, Any]) -> None:
            prompt = words(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]
            if len(prompt) + body["max_tokens"] > behaviour.length:
                return self.reply(400, '{"error": "the maximum context length"}')
            given = engine.answer(body["model"], prompt, body["max_tokens"])
            choices = {"tokens": [min(one) for one in given], "top_logprobs": given}
            self.send_response(200)
            self.end_headers()
            if engine.counts["request_success"] > behaviour.ends_after:
                self.wfile.write(b"data: {")
                return
            self.event({"choices": [{"logprobs": choices}]})
            self.event({"choices": [], "usage": {"prompt_tokens": len(prompt)}})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, event: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def reset() -> str:
        engine.gpu.clear()
        return '{"success": true}'

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: Any) -> None:
            """A client that has gone."""

    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", engine
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def words(text: str) -> list[int]:
    return [int.from_bytes(hashlib.sha256(word.encode()).digest()[:2], "big") for word in text.split()]
