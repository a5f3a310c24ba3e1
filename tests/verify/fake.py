"""A stand-in for vLLM's HTTP server. The stand-in answers requests of httpx in the same process, without a network.

The stand-in has a GPU cache and a connector's cache. Log probabilities depend on the model and the prompt.
"""

import hashlib
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any
from unittest import mock

import httpx

from kvfix_tools.verify import client

URL = "http://127.0.0.1:8000"
BLOCK, CHUNK = 16, 64
NAMES = ("request_success", "external_prefix_cache_queries", "external_prefix_cache_hits")  # counters of /metrics


@dataclass
class Engine:
    noise: float = 0.0  # standard deviation of the noise in each log probability
    #: Return True to make the answer wrong. Arguments: prompt, prompt tokens from the connector, requests since the
    #: last read of /metrics. `kvfix verify` reads /metrics before and after each request that it sends alone.
    wrong: Callable[[list[int], int, int], bool] = lambda prompt, hit, together: False
    keeps: int = 1 << 30  # number of prompts that the connector can keep
    others: bool = False  # each request comes together with a request of another client
    spreads_nan: bool = False  # the first answer with a hit is NaN, and then every third answer is NaN
    has_counts: bool = True  # /metrics counts the requests
    connector: bool = True
    stores: bool = True
    missing: tuple[str, ...] = ()  # paths that return 404
    key: str = ""
    ends_after: int = 1 << 30  # number of answers until the connection ends in the middle of an answer
    blocks: int = 1000
    length: int = 4096
    vocabulary: int = 1 << 16
    models: tuple[tuple[str, str | None], ...] = (("tiny", None),)
    adapters_share: bool = False
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        self.gpu: list[tuple[str, list[int]]] = []
        self.external: list[tuple[str, list[int]]] = []
        self.counts = dict.fromkeys(NAMES, 0.0)
        self.drawn, self.lock = random.Random(0), threading.Lock()
        self.together, self.since_nan = 0, -1
        self.paths: list[str] = []

    def answer(self, model: str, prompt: list[int], count: int) -> list[dict[str, float | None]]:
        with self.lock:
            self.together += 1
            cached = min(longest(self.gpu, model, prompt), len(prompt) - 1) if self.prefix_caching else 0
            here = cached // BLOCK * BLOCK
            there = "" if self.adapters_share else model
            stored = longest(self.external, there, prompt) // CHUNK * CHUNK if self.connector else 0
            hit = max(0, min(stored, len(prompt) - 1) - here)
            self.counts["external_prefix_cache_queries"] += (len(prompt) - here) * self.connector
            self.counts["external_prefix_cache_hits"] += hit
            self.counts["request_success"] += 1 + self.others
            self.gpu = [each for each in self.gpu if each != (model, prompt)]  # a prompt's blocks are cached once
            self.gpu.append((model, prompt))
            while sum(len(one) for _, one in self.gpu) > self.blocks * BLOCK:
                del self.gpu[0]
            if self.stores:
                self.external.append((there, prompt))
                del self.external[: -self.keeps]
            wrong = hit > 0 and self.wrong(prompt, hit, self.together)
            if self.spreads_nan and (hit > 0 or self.since_nan >= 0):
                self.since_nan += 1
                if self.since_nan % 3 == 0:
                    return [dict.fromkeys(f"token_id:{n}" for n in range(5))] * count
            values = random.Random(hashlib.sha256(f"{model} {prompt} {wrong}".encode()).digest())
            return [
                {f"token_id:{n}": -1.0 - 5 * values.random() + self.drawn.gauss(0, self.noise) for n in range(5)}
                for _ in range(count)
            ]

    def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.paths.append(path)
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        if path in self.missing:
            return httpx.Response(404, json={"detail": "Not Found"})
        body = json.loads(request.content or "null")
        if path == "/metrics":
            return httpx.Response(200, text=self.metrics())
        if path == "/v1/completions":
            return self.completion(body)
        if path == "/reset_prefix_cache":
            self.gpu.clear()
        answers: dict[str, Any] = {
            "/v1/models": {
                "data": [
                    {"id": name, "parent": of, "max_model_len": None if of else self.length} for name, of in self.models
                ]
            },
            "/version": {"version": "0.32.0"},
            "/tokenize": body and {"tokens": [each % self.vocabulary for each in words(body["prompt"])]},
            "/reset_prefix_cache": {"success": True},
        }
        return httpx.Response(200, json=answers[path])

    def completion(self, body: dict[str, Any]) -> httpx.Response:
        prompt = words(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]
        if len(prompt) + body["max_tokens"] > self.length:
            return httpx.Response(400, json={"error": "the maximum context length"})
        given = self.answer(body["model"], prompt, body["max_tokens"])
        if self.counts["request_success"] > self.ends_after:
            return httpx.Response(200, text="data: {")
        choices = {"tokens": [min(one) for one in given], "top_logprobs": given}
        events = [{"choices": [{"logprobs": choices}]}, {"choices": [], "usage": {"prompt_tokens": len(prompt)}}]
        return httpx.Response(200, text="".join(f"data: {line}\n\n" for line in [*map(json.dumps, events), "[DONE]"]))

    def metrics(self) -> str:
        self.together = 0
        counts = self.counts if self.has_counts else dict.fromkeys(self.counts, 0.0)
        lines = [f'vllm:{name}_total{{engine="0"}} {value}' for name, value in counts.items()]
        info = f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{self.blocks}"}} 1.0'
        return "\n".join([*lines, info, ""])


def longest(cache: list[tuple[str, list[int]]], model: str, prompt: list[int]) -> int:
    """Return the length of the longest cached prefix of the prompt, in tokens."""
    both = (zip(prompt, other, strict=False) for owner, other in cache if owner == model)
    return max((sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) for pairs in both), default=0)


@contextmanager
def served(engine: Engine) -> Iterator[None]:
    answered = partial(httpx.Client, transport=httpx.MockTransport(engine.handle))
    with mock.patch.object(client.httpx, "Client", answered):
        yield


def words(text: str) -> list[int]:
    return [int.from_bytes(hashlib.sha256(word.encode()).digest()[:2], "big") for word in text.split()]
