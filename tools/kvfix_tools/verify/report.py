"""The results of a run of `kvfix verify`, and the text and JSON that the command prints."""

import math
import statistics
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from packaging.version import InvalidVersion, Version

from kvfix_tools.verify.client import Reply
from kvfix_tools.verify.compare import FAR, MARGIN, TOO_NOISY, Difference, Judge
from kvfix_tools.verify.prompts import Prompt, Sizes

SAME, DIFFERENT, REFUSED, NOTHING_PROVEN = 0, 1, 2, 77
VERDICTS = {SAME: "same", DIFFERENT: "different", REFUSED: "refused", NOTHING_PROVEN: "nothing proven"}
#: kvfix sends all prompts again in each mode, to get KV from the connector. ALONE: one by one. UNDER_LOAD: all at once.
ALONE, UNDER_LOAD = "alone", "under load"
MODES = (ALONE, UNDER_LOAD)
#: Possible reasons why too few tokens came from the connector.
LOOK_AT = """
Possible reasons:
- The connector is not active: run `kvfix doctor -- vllm serve ...`, and check that vLLM's log names the connector.
- The memory of the connector is too small for all prompts: increase it, for example max_local_cpu_size.
- The chunk is larger than the prompts: use --prompt-tokens of at least three chunks.
- LMCache stores whole chunks only, unless save_unfull_chunk is set.
- Scheduler and worker of LMCache hash differently: set PYTHONHASHSEED=0.
- Several engines are behind this URL: use the port of one engine.
""".strip().splitlines()
NARROW = (
    'kvfix search "wrong output with KV cache hits"',
    "kvfix roundtrip --backend lmcache vllm    checks every byte of KV, on the machine of the engine",
    "kvfix run --mode check -- vllm serve ...  checks the token counts at every connector hook",
)


@dataclass
class Case:
    prompt: Prompt
    tokens: int
    computed: Reply
    control: float | None = None  # difference between two answers without KV from the connector; None if unknown
    warm: Reply | None = None  # the answer in mode ALONE
    #: For each mode, the difference between the computed answer and the answer with KV from the connector.
    cached: dict[str, Difference] = field(default_factory=dict)

    @property
    def hits(self) -> int | None:
        """Tokens from the connector in mode ALONE; None if requests of other clients hide the number."""
        return self.warm.hits if self.warm else 0


@dataclass
class Confirmation:
    kind: str
    mode: str
    differs: int
    asked: int
    needed: int

    @property
    def holds(self) -> bool:
        return self.differs >= self.needed


@dataclass
class Outcome:
    """The results of a run. Only the survey, the first round, counts NaN answers, because NaN spoils later answers."""

    sizes: Sizes
    judge: Judge
    cases: list[Case]
    preemptions: int
    flushed_by: str
    not_numbers: int  # number of survey prompts (`Rounds._survey`) whose answer is NaN with KV from the connector
    confirmations: list[Confirmation] = field(default_factory=list)
    shared_with: str = ""  # name of an adapter that got another adapter's KV; "" if there is none

    @property
    def compared(self) -> int:
        return sum(len(case.cached) for case in self.cases)

    @property
    def hits(self) -> int | None:
        """Tokens from the connector in mode ALONE; None if requests of other clients hide the number."""
        known = [case.hits for case in self.cases if case.hits is not None]
        return sum(known) if known else None

    @property
    def expected(self) -> int:
        """Tokens to expect from the connector: the whole chunks of all prompts without a shared prefix."""
        known = [case for case in self.cases if case.hits is not None and case.prompt.kind != "shared prefix"]
        return sum((case.computed.prompt_tokens - 1) // self.sizes.chunk * self.sizes.chunk for case in known)

    @property
    def first_test(self) -> bool:
        controlled = [case.cached.values() for case in self.cases if case.control is not None]
        return self.judge.first_test([max(each.size for each in differences) for differences in controlled])

    def above(self, mode: str, kind: str = "") -> list[Case]:
        asked = [case for case in self.cases if kind in ("", case.prompt.kind) and mode in case.cached]
        return [case for case in asked if self.judge.exceeds(case.cached[mode].size)]


def verdict(outcome: Outcome) -> tuple[int, str]:
    """Return the exit code and the reason. The last line of the output shows the reason."""
    found = outcome.first_test or outcome.shared_with or outcome.not_numbers
    if found or any(each.holds for each in outcome.confirmations):
        return DIFFERENT, where(outcome)
    if why := why_not(outcome):
        return NOTHING_PROVEN, why
    return SAME, f"{len(outcome.cases)} prompts, {outcome.hits} tokens from the connector"


def why_not(outcome: Outcome) -> str:
    """Return why a run without a wrong answer proves nothing, or "" if the run proves that KV is right."""
    judge = outcome.judge
    if outcome.hits is None:
        return (
            "requests of other clients hide the number of tokens from the connector. Run kvfix verify while the server"
            " is idle, or start the server with --enable-prompt-tokens-details"
        )
    if outcome.hits < outcome.expected / 2:
        return f"only {outcome.hits} of {outcome.expected} expected tokens came from the connector"
    if judge.limit > TOO_NOISY:
        return f"the noise is too large: a log probability moves by {judge.noise:.3g} without the connector"
    far = [case for mode in MODES for case in outcome.above(mode) if case.cached[mode].size > FAR * judge.noise]
    if far and not judge.is_exact:
        return (
            f"{len(far)} answers differ by more than {FAR:g} times the noise, but new prompts of the"
            f" same kind did not show this difference. Run again with --requests {4 * len(outcome.cases)}"
        )
    return ""


def where(outcome: Outcome) -> str:
    if outcome.not_numbers:
        return "the model computes NaN with KV from the connector"
    if outcome.shared_with and not any(map(outcome.above, MODES)):
        return "the connector loads KV of the tested model for another adapter"
    modes = [mode for mode in MODES if outcome.above(mode)]
    when = "only under load" if modes == [UNDER_LOAD] else "alone and under load"
    above = [case for mode in modes for case in outcome.above(mode)]
    wrong = {case.prompt.kind for case in above}
    if wrong >= {case.prompt.kind for case in outcome.cases if case.hits}:
        return f"wrong for all hits, {when}"
    chunks = {_chunks(case, outcome) for case in above}
    if len(chunks) == 1 and chunks.isdisjoint(_chunks(case, outcome) for case in outcome.cases if case not in above):
        return f"wrong where exactly {chunks.pop()} chunks come from the connector, {when}"
    return f"wrong for {' and '.join(repr(kind) for kind in sorted(wrong))}, {when}"


def _chunks(case: Case, outcome: Outcome) -> int:
    """Count a chunk from the connector even if vLLM computes the chunk's last token."""
    return math.ceil((case.hits or 0) / outcome.sizes.chunk)


def first_tokens(outcome: Outcome) -> tuple[float, float]:
    """Return the median seconds until the first token, as (computed, with KV from the connector)."""
    pairs = [(case.computed.first, case.warm.first) for case in outcome.cases if case.hits and case.warm]
    if not pairs:
        return 0.0, 0.0
    return statistics.median(one for one, _ in pairs), statistics.median(other for _, other in pairs)


def as_json(outcome: Outcome) -> dict[str, Any]:
    computed, cached = first_tokens(outcome)
    judge = outcome.judge
    kinds = {
        kind: {
            "prompts": len(cases),
            "hit_tokens": sum(case.hits or 0 for case in cases),
            "largest_difference": {mode: max(case.cached[mode].size for case in cases) for mode in MODES},
            "above_limit": {mode: len(outcome.above(mode, kind)) for mode in MODES},
        }
        for kind, cases in by_kind(outcome.cases).items()
    }
    return {
        "chunk": outcome.sizes.chunk, "block": outcome.sizes.block,
        "hit_tokens": outcome.hits, "expected_hit_tokens": outcome.expected,
        "first_token_seconds": {"computed": computed, "cached": cached},
        "flushed_by": outcome.flushed_by, "preemptions": outcome.preemptions,
        "controls": len(judge.controls), "noise": judge.noise, "limit": judge.limit, "is_exact": judge.is_exact,
        "false_alarm_rate": judge.error_rate(outcome.compared), "kinds": kinds, "shared_with": outcome.shared_with,
        "not_numbers": outcome.not_numbers,
        "confirmations": [vars(each) | {"holds": each.holds} for each in outcome.confirmations],
    }  # fmt: skip


def lines(outcome: Outcome, vllm: str) -> list[str]:
    computed, cached = first_tokens(outcome)
    judge, (code, _) = outcome.judge, verdict(outcome)
    noise = f"{len(judge.controls)} prompts, repeated without the connector, differ by at most {judge.noise:.3g}"
    if judge.is_exact:
        noise = f"{len(judge.controls)} prompts, repeated without the connector, are equal in every bit"
    text = [
        f"From the connector: {outcome.hits or 0} tokens, in chunks of {outcome.sizes.chunk}",
        f"First token:        {computed * 1000:.0f} ms computed, {cached * 1000:.0f} ms from the connector (median)",
        f"GPU cache emptied:  {outcome.flushed_by}",
        f"Noise:              {noise}",
        f"Limit:              {judge.limit:.3g} ({MARGIN:g} times the noise); rate of false alarms below"
        f" {judge.error_rate(outcome.compared):.0e}",
        "",
        f"{'prompts':33} {'from the':>9}  largest difference of a log probability",
        f"{'':33} {'connector':>9}  {'alone':>12}  {'under load':>12}",
    ]
    for kind, row in as_json(outcome)["kinds"].items():
        sizes = [f"{size:>12.3g}{'*' if judge.exceeds(size) else ' '}" for size in row["largest_difference"].values()]
        text.append(f"{row['prompts']:3} {kind:29} {row['hit_tokens']:>9}  {' '.join(sizes)}".rstrip())
    text.append("* above the limit" if any(map(outcome.above, MODES)) else "")
    text += [
        f"Fresh prompts of '{each.kind}', {each.mode}: {each.differs} of {each.asked} differ;"
        f" {each.needed} are needed to confirm"
        for each in outcome.confirmations
    ]
    if outcome.preemptions:
        text.append(f"Under load, vLLM preempted {outcome.preemptions} times.")
    if code == DIFFERENT:
        text += ["", *_example(outcome), *_known(vllm)]
    if code == NOTHING_PROVEN and (outcome.hits or 0) < outcome.expected / 2:
        text += ["", *LOOK_AT]
    return text


def by_kind(cases: list[Case]) -> dict[str, list[Case]]:
    kinds: dict[str, list[Case]] = {}
    for case in cases:
        kinds.setdefault(case.prompt.kind, []).append(case)
    return kinds


def _example(outcome: Outcome) -> list[str]:
    wrong, text = [(mode, case) for mode in MODES for case in outcome.above(mode)], list[str]()
    if wrong:
        mode, case = max(wrong, key=lambda pair: pair[1].cached[pair[0]].size)
        different, chunk = case.cached[mode], outcome.sizes.chunk
        text = [
            f"The answer to a prompt of {case.computed.prompt_tokens} tokens ('{case.prompt.kind}', {mode})"
            " has the largest difference.",
            f"  {case.hits or 0} tokens came from the connector: {(case.hits or 0) / chunk:.4g} chunks of {chunk}.",
            f"  At token {different.position + 1} of the answer, the log probability of {different.token} is"
            f" {different.computed:.4f} without cached KV, and {different.cached:.4f} with cached KV.",
        ]
    if outcome.not_numbers:
        text += [
            f"{outcome.not_numbers} of the first prompts get the answer NaN with cached KV, but not without cached KV.",
            "  NaN stays in the engine's memory and spoils later answers: restart the engine, and empty the cache.",
        ]
    if outcome.shared_with:
        text += [
            f"{outcome.shared_with} got KV of a prompt that kvfix sent only to the tested model: adapters share KV.",
            "  LMCache: kvfix run --plus KVF017 -- CMD (in process), or --plus KVF111 (server).",
        ]
    return text


def _known(vllm: str) -> list[str]:
    text = ["", "Next steps:"]
    with suppress(InvalidVersion):
        if Version(vllm) >= Version("0.26"):  # since 0.26, vLLM stores K and V of a head along one axis
            text += [
                f"  With vLLM {vllm} and LMCacheConnectorV1 every hit is wrong in LMCache as released."
                " KVF020 fixes this:",
                "    kvfix run -- vllm serve ...; then clear LMCache's disk and remote caches (kvfix explain KVF020).",
            ]
    return text + [f"  {line}" for line in NARROW]
