"""The command `kvfix verify URL`, with its options and output."""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvfix_tools import screen
from kvfix_tools.verify import report
from kvfix_tools.verify.client import Metrics, OutOfTime, Refused, Server
from kvfix_tools.verify.prompts import TOKENS, WORDS, Maker, Sizes
from kvfix_tools.verify.rounds import SURVEY, Inconclusive, Rounds

TOKENS_PER_WORD = 1.3  # an estimate for servers that do not offer /tokenize
FEWEST_TOKENS = 8  # minimum number of different tokens. With fewer tokens, two prompts may share blocks by chance


class Options(NamedTuple):
    url: str
    model: str = ""
    decode: str = ""
    requests: int = 48
    prompt_tokens: int = 1200
    chunk: int = 0
    clients: int = 8
    seconds: float = 300.0
    api_key_env: str = ""
    json: bool = False
    dry_run: bool = False
    seed: int | None = None


def verify(options: Options) -> int:
    """Return 0 if the answers are equal, 1 if they differ, 2 if the server refuses, or 77 if the run proves nothing."""
    about: dict[str, Any] = {"url": options.url, "model": options.model, "vllm": ""}
    key = os.environ.get(options.api_key_env, "") if options.api_key_env else ""
    if options.api_key_env and not key:
        why = f"the variable {options.api_key_env} is not set. Set it to the API key of the server"
        return _end(options, about, report.REFUSED, why)
    start = time.monotonic()
    subject = Server(options.url, key, start + options.seconds)
    reference = Server(options.decode, key, start + options.seconds) if options.decode else subject
    try:
        return _verify(options, about, subject, reference)
    except Refused as refused:
        return _end(options, about, report.REFUSED, str(refused))
    except Inconclusive as why:
        return _end(options, about, report.NOTHING_PROVEN, str(why), report.LOOK_AT)
    except OutOfTime:
        why_not = f"the run did not finish in {options.seconds:g} s. Use a longer --seconds, or fewer --requests"
        return _end(options, about, report.NOTHING_PROVEN, why_not)
    finally:
        subject.close()
        reference.close()


def _verify(options: Options, about: dict[str, Any], subject: Server, reference: Server) -> int:
    models = reference.models()
    chosen = next((each for each in models if options.model in ("", each["id"])), None)
    if chosen is None:
        names = ", ".join(each["id"] for each in models)
        raise Refused(f"{reference.url} has no model {options.model!r}. Give --model with one of: {names}")
    subject.model = reference.model = about["model"] = chosen["id"]
    about["vllm"] = reference.version()
    try:
        metrics = reference.metrics()
    except Refused:
        raise Inconclusive(
            f"{reference.url} has no /metrics of vLLM, so kvfix cannot count tokens from the connector."
            " Use the port of the engine, not of a proxy"
        ) from None
    # vLLM reports the context length only for the base model, so use the length of the adapter's parent.
    base = next((each for each in models if each["id"] == chosen.get("parent")), chosen)
    context = int(chosen.get("max_model_len") or base.get("max_model_len") or 0)
    maker, sizes = _plan(options, reference, metrics, context)
    rounds = Rounds(subject, reference, maker, sizes, metrics.blocks * metrics.block, options.clients, screen.progress)
    if options.dry_run:
        return _dry_run(options, maker, sizes, rounds)
    started = time.monotonic()
    related = [each["id"] for each in models if base["id"] in (each["id"], each.get("parent"))]
    outcome = rounds.run(options.requests, [name for name in related if name != chosen["id"]])
    about["seconds"] = time.monotonic() - started
    code, why = report.verdict(outcome)
    head = f"kvfix verify {options.url}: model {about['model']}, vLLM {about['vllm'] or 'unknown'}\n"
    lines = [head, *report.lines(outcome, about["vllm"])]
    return _end(options, about, code, f"{why}, in {about['seconds']:.0f} s", lines, report.as_json(outcome))


def _plan(options: Options, server: Server, metrics: Metrics, model_length: int) -> tuple[Maker, Sizes]:
    vocabulary = server.tokenize(" ".join(WORDS))
    per_word = len(vocabulary) / len(WORDS) if vocabulary else TOKENS_PER_WORD
    block = metrics.block or 16
    longest = max(options.prompt_tokens, 2 * options.chunk + block + 1)
    longest = min(longest, model_length - block - TOKENS if model_length else longest)
    if longest < 3 * block:
        why = f"prompts of {longest} tokens are shorter than three blocks of {block}. Use a larger --prompt-tokens"
        raise Refused(why)
    if 0 < len(set(vocabulary)) < FEWEST_TOKENS:
        raise Refused(
            f"the tokenizer of {server.url} makes only {len(set(vocabulary))} different tokens of {len(WORDS)} words,"
            " so prompts are too similar"
        )
    maker = Maker(sorted(set(vocabulary)), per_word, random.Random(options.seed))
    return maker, Sizes(options.chunk, block, longest, model_length)


def _dry_run(options: Options, maker: Maker, sizes: Sizes, rounds: Rounds) -> int:
    kinds = Counter(maker.kinds(options.requests))
    count = sum(kinds.values())
    print(f"{count} prompts of up to {sizes.longest} tokens, {TOKENS} answered tokens each:")
    print("\n".join(f"  {number:3} {kind}" for kind, number in kinds.items()))
    print(f"Requests: about {2 * SURVEY} to find the chunk size, {count} to compute KV, {2 * count} controls")
    print(f"  without the connector. With KV from the connector: {count} alone, and {count + count // 4} under load.")
    print(f"Without POST /reset_prefix_cache, kvfix sends {rounds.fillers} prompts 3 times to empty the GPU cache.")
    print(f"The run ends after at most {options.seconds:g} s. This dry run has sent no prompt to the model.")
    return report.SAME


def _end(
    options: Options, about: dict[str, Any], code: int, why: str, lines: Sequence[str] = (), answer: Any = None
) -> int:
    """Print the result, and return the exit code. answer: the results for JSON, or None if the run was incomplete."""
    screen.progress("")
    if options.json:
        print(json.dumps({**about, "verdict": report.VERDICTS[code], "exit": code, **(answer or {"reason": why})}))
    else:
        print("\n".join([*lines, f"SUMMARY: kvfix verify {report.VERDICTS[code]}: {why}"]))
    return code
