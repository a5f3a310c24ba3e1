"""Make the prompts of `kvfix verify`. This module does no input or output.

A prompt starts with random tokens, so no cache has a part of the prompt. A prompt ends with a copy of some of its
earlier tokens. To continue the copy, the model reads the KV of the earlier tokens, so one wrong chunk far from the end
changes the answer.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

#: Common words. Each word is a few tokens in any vocabulary.
TEXT = """
able about above across again air all also always animal answer any area ask autumn away back bank base bear beat
before begin below best big bird black blue board boat body bone book both bottle box bread bridge bring brother build
burn busy call came camp car care carry case cat catch cause chair chance city class clean clear climb clock close
cloud coast cold color come common cook cool copy corn cost count country cover cross cry cup cut dance dark day deep
door down draw dream
"""
WORDS = TEXT.split()
TOKENS = 8  # number of tokens to generate for each answer
CUE = 12  # number of tokens at the end of a prompt that repeat earlier tokens
#: {kind of prompt: number of prompts of this kind among 16}
SHARES = {
    "many chunks": 5,
    "shared prefix": 3,
    "one chunk and one token": 4,
    "whole chunks": 1,
    "one chunk": 1,
    "one chunk less one token": 1,
    "text": 1,
}


class Prompt(NamedTuple):
    kind: str
    body: tuple[int, ...] | str  # token ids, or a text

    @property
    def length(self) -> int:
        """Length in tokens, or 0 for a text, whose length only the server knows."""
        return 0 if isinstance(self.body, str) else len(self.body)


class Sizes(NamedTuple):
    chunk: int
    block: int
    longest: int  # number of tokens of the longest prompt
    context: int = 0  # the model's context length in tokens; 0 if unknown

    @property
    def whole(self) -> int:
        """Length in tokens of the longest prompt of whole chunks, which has at least two chunks."""
        return max(2, (self.longest - self.block - 1) // self.chunk) * self.chunk

    @property
    def fits(self) -> bool:
        """True if the longest prompt of whole chunks fits into the model's context together with the answer."""
        return not self.context or self.whole + 2 * self.block + TOKENS < self.context


@dataclass
class Maker:
    vocabulary: list[int]  # token ids from which prompts are drawn; if empty, every prompt is a text
    tokens_per_word: float
    drawn: random.Random

    def kinds(self, count: int) -> list[str]:
        """Return the kinds of about `count` prompts, in the order of the requests."""
        if not self.vocabulary:
            return ["text"] * count
        total = sum(SHARES.values())
        return [kind for kind, share in SHARES.items() for _ in range(max(1, round(count * share / total)))]

    def prompts(self, kinds: list[str], sizes: Sizes) -> Iterator[Prompt]:
        """Yield prompts of these kinds. Up to three consecutive `shared prefix` prompts share a prefix."""
        prefix: list[int] = []
        for number, kind in enumerate(kinds):
            if kind == "text":
                yield Prompt(kind, self.text(sizes.longest // 2))
            elif kind == "shared prefix":
                if number % 3 == 0 or not prefix:
                    prefix = self.fresh(sizes.whole)
                yield self.cued(kind, prefix, sizes.whole + sizes.block + 1)
            else:
                yield self.cued(kind, [], self.length(kind, sizes))

    def length(self, kind: str, sizes: Sizes) -> int:
        """Return the length in tokens. A repeated prompt of N blocks + 1 token hits N blocks in the prefix cache."""
        chunk, block = sizes.chunk, sizes.block
        if kind == "many chunks":
            least = chunk // block + 1
            return self.drawn.randint(least, max(least, (sizes.longest - 1) // block)) * block + 1
        lengths = {"one chunk and one token": chunk + 1, "one chunk": chunk, "one chunk less one token": chunk - 1}
        return lengths.get(kind, sizes.whole)

    def fresh(self, tokens: int) -> list[int]:
        return self.drawn.choices(self.vocabulary, k=tokens)

    def text(self, tokens: int) -> str:
        """Return a text with about this number of tokens."""
        words = self.drawn.choices(WORDS, k=max(8, int(tokens / self.tokens_per_word)))
        at = self.drawn.randrange(len(words) - 3)
        return " ".join([*words, *words[at : at + 3]])

    def cued(self, kind: str, start: list[int], tokens: int) -> Prompt:
        body = [*start, *self.fresh(tokens - len(start))]
        cue = min(CUE, tokens // 4)
        at = self.drawn.randrange(tokens - 2 * cue)
        body[-cue:] = body[at : at + cue]
        return Prompt(kind, tuple(body))
