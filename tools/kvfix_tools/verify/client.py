"""An HTTP client of one vLLM server. The client reads the models, the metrics, and each answer's log probabilities."""

import json
import time
from collections.abc import Generator
from contextlib import suppress
from typing import Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvfix_tools.verify.compare import SMALLEST, Answer
from kvfix_tools.verify.prompts import Prompt

TOP = 5  # number of log probabilities to request for each generated token
SILENCE = 120.0  # maximum seconds without a byte from the server


class Refused(Exception):
    """The server is unreachable or returns an error. The exception's text says why, and what the user can do."""


class OutOfTime(Exception):
    """The time limit of the run (--seconds) is over."""


class Metrics(NamedTuple):
    """Metrics, summed over all engines. queried: tokens that vLLM looked up in the connector. hits: tokens found."""

    requests: float
    queried: float
    hits: float
    preemptions: float
    blocks: int  # number of GPU blocks; 0 if unknown
    block: int  # tokens of one block; 0 if unknown


class Reply(NamedTuple):
    answer: Answer
    first: float  # seconds until the first token
    prompt_tokens: int  # number of prompt tokens, as the server counts them
    cached: int | None  # tokens from any cache; None unless the server runs with --enable-prompt-tokens-details
    counted: int | None = None  # tokens from the connector, by /metrics. None if unread, or if other clients are active

    @property
    def hits(self) -> int | None:
        """Tokens from the connector. Without `counted`, use `cached`, because kvfix has emptied the GPU's own cache."""
        return self.cached if self.counted is None else self.counted


class Server:
    def __init__(self, url: str, key: str, until: float) -> None:
        """Take a url with or without /v1, a bearer token or "", and the time.monotonic() at which the run must end."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = ""
        self.until = until
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(SILENCE, connect=10.0))

    def close(self) -> None:
        self._client.close()

    def models(self) -> list[dict[str, Any]]:
        return list(self._json("GET", "/v1/models").get("data", []))

    def version(self) -> str:
        """Return vLLM's release, or "" if the server does not report it."""
        with suppress(Refused):
            return str(self._json("GET", "/version").get("version", ""))
        return ""

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, or [] if the server does not offer /tokenize."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        with suppress(Refused):
            return [int(token) for token in self._json("POST", "/tokenize", body).get("tokens", [])]
        return []

    def reset(self) -> bool | None:
        """Empty the GPU's prefix cache. Return False if blocks are in use, or None if the server refuses the reset."""
        with suppress(Refused):
            answer = self._request("POST", "/reset_prefix_cache")
            # vLLM before 0.11 returns an empty body.
            return bool(answer.json().get("success", True)) if answer.content.strip() else True
        return None

    def metrics(self) -> Metrics:
        """Return the metrics. Raise Refused if the server has no /metrics page of vLLM."""
        samples: list[Any] = []
        with suppress(Refused, ValueError):  # a page that is not Prometheus text raises ValueError
            families = text_string_to_metric_families(self._request("GET", "/metrics").text)
            samples = [sample for family in families for sample in family.samples]
        if not any(sample.name.startswith("vllm:") for sample in samples):
            raise Refused(f"{self.url}/metrics does not answer, or has no metrics of vLLM")

        def count(name: str) -> float:
            return float(sum(sample.value for sample in samples if sample.name == f"vllm:{name}_total"))

        configs = [sample.labels for sample in samples if sample.name == "vllm:cache_config_info"]
        return Metrics(
            count("request_success"), count("external_prefix_cache_queries"), count("external_prefix_cache_hits"),
            count("num_preemptions"), sum(_number(config.get("num_gpu_blocks")) for config in configs),
            _number(configs[-1].get("block_size") if configs else None),
        )  # fmt: skip

    def metrics_after(self, before: Metrics) -> Metrics:
        until = time.monotonic() + 5.0  # the server updates its metrics only after it has sent the answer
        while True:
            now = self.metrics()
            if now.requests > before.requests or time.monotonic() > until:
                return now
            time.sleep(0.005)

    def ask(self, prompt: Prompt, tokens: int, model: str = "") -> Reply:
        start = time.monotonic()
        first, usage = 0.0, dict[str, Any]()
        answered: list[str] = []
        logprobs: list[dict[str, float]] = []
        for event in self._events(prompt, tokens, model):
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                first = first or time.monotonic() - start
                given = choice.get("logprobs") or {}
                answered += given.get("tokens") or []
                logprobs += [_finite(each) for each in given.get("top_logprobs") or []]
        if not answered:
            raise Refused(f"{self.url} sends no log probabilities. Start the server with --max-logprobs {TOP} or more")
        details = usage.get("prompt_tokens_details") or {}
        answer = Answer(tuple(answered), tuple(logprobs))
        return Reply(answer, first, int(usage.get("prompt_tokens") or prompt.length), details.get("cached_tokens"))

    def abort(self, prompt: Prompt, tokens: int) -> None:
        events = self._events(prompt, tokens, "")
        next(events, None)
        events.close()

    def _events(self, prompt: Prompt, tokens: int, model: str) -> Generator[dict[str, Any], None, None]:
        body = prompt.body if isinstance(prompt.body, str) else list(prompt.body)
        wanted = {
            "model": model or self.model, "prompt": body, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "logprobs": TOP, "return_tokens_as_token_ids": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        self._in_time()
        try:
            with self._client.stream("POST", f"{self.url}/v1/completions", json=wanted) as response:
                if not response.is_success:
                    response.read()
                    raise Refused(self._why(response, "/v1/completions"))
                for line in response.iter_lines():
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        event = json.loads(line[5:])
                        if "error" in event:
                            raise Refused(f"{self.url} failed in the middle of an answer: {str(event['error'])[:300]}")
                        yield event
        except (httpx.HTTPError, ValueError) as error:
            raise Refused(f"{self.url} closed the connection during an answer: {_text(error)}") from None

    def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        with suppress(ValueError):
            answer = self._request(method, path, body).json()
            if isinstance(answer, dict):
                return answer
        raise Refused(f"{self.url}{path} does not answer as vLLM does")

    def _request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        self._in_time()
        try:
            response = self._client.request(method, f"{self.url}{path}", json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Refused(f"{self.url} does not answer: {_text(error)}") from None
        if not response.is_success:
            raise Refused(self._why(response, path))
        return response

    def _in_time(self) -> None:
        if time.monotonic() > self.until:
            raise OutOfTime

    def _why(self, response: httpx.Response, path: str) -> str:
        if response.status_code in (401, 403):
            return f"{self.url}{path} needs an API key. Give --api-key-env NAME, the variable with the key"
        return f"{self.url}{path} answers {response.status_code}: {response.text[:300]}"


def _finite(logprobs: dict[str, float | None] | None) -> dict[str, float]:
    """Replace null, which stands for NaN in JSON, with vLLM's smallest log probability."""
    return {token: SMALLEST if value is None else float(value) for token, value in (logprobs or {}).items()}


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
