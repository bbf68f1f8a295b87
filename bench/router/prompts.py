"""The workload of `bench.router`: prompts, the workers that hold them, and queries.

The module needs only the standard library, because the peer's interpreter imports it as well. The
same seed gives the same workload in both processes.

A prompt has one of a few shared prefixes, such as a system prompt, and a tail of its own. One
worker holds all of its blocks and two others hold a part. Queries are next turns of such prompts
(equal up to some block, then new), repeated prompts, and prompts that no worker holds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

WORKERS = 64
BLOCK_TOKENS = 32
PROMPT_BLOCKS = 2000
SHARED = 8
SHARED_BLOCKS = 500
HELD_PARTS = (500, 1000, 1500, 2000)
QUERIES = 400
PIECE = 250  # blocks that a worker reports at once


class HeldPrefix(NamedTuple):
    """Worker ``worker`` holds the first ``blocks`` blocks of prompt ``prompt``."""

    prompt: int
    worker: int
    blocks: int


class PrefixWorkload:
    """A workload of about ``blocks`` distinct blocks."""

    def __init__(self, blocks: int, seed: int = 0) -> None:
        rng = Random(seed)
        self._seed = seed
        self.prompts = max(1, (blocks - SHARED * SHARED_BLOCKS) // (PROMPT_BLOCKS - SHARED_BLOCKS))
        self._shared = [_tokens(rng, SHARED_BLOCKS) for _ in range(SHARED)]
        self.held = [
            HeldPrefix(prompt, worker, rng.choice(HELD_PARTS) if part else PROMPT_BLOCKS)
            for prompt in range(self.prompts)
            for part, worker in enumerate(rng.sample(range(WORKERS), 3))
        ]
        rng.shuffle(self.held)
        self._asked = [(rng.randrange(self.prompts), _cut(rng)) for _ in range(QUERIES)]

    def prompt(self, number: int) -> array[int]:
        """Return the PROMPT_BLOCKS * BLOCK_TOKENS tokens of a prompt."""
        rng = Random(f"prompt {self._seed} {number}")
        return rng.choice(self._shared) + _tokens(rng, PROMPT_BLOCKS - SHARED_BLOCKS)

    def queries(self) -> Iterator[array[int]]:
        """Yield the tokens of each query."""
        for number, (prompt, cut) in enumerate(self._asked):
            new = _tokens(Random(f"query {self._seed} {number}"), PROMPT_BLOCKS - cut)
            yield self.prompt(prompt)[: cut * BLOCK_TOKENS] + new


def _cut(rng: Random) -> int:
    """Draw how many blocks a query shares with the prompt that it continues."""
    return rng.choices([rng.randrange(1, PROMPT_BLOCKS), PROMPT_BLOCKS, 0], [0.7, 0.2, 0.1])[0]


def _tokens(rng: Random, blocks: int) -> array[int]:
    return array("I", rng.randbytes(blocks * BLOCK_TOKENS * 4))
