"""What to send, and when: a list of items, each a pure function of the options and the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count, islice, takewhile
from typing import NamedTuple

from bench.serve import arrivals
from bench.serve.lengths import Share, draw_lengths
from bench.serve.traces import BLOCK_TOKENS, Line, fitted


class Piece(NamedTuple):
    """``size`` tokens of a prompt. Equal keys have equal tokens; the shorter is a prefix."""

    key: str
    size: int


class Item(NamedTuple):
    """A request. ``at``: seconds after the beginning when it is due (closed loop: 0)."""

    number: int
    at: float
    pieces: tuple[Piece, ...]
    output: int

    @property
    def prompt(self) -> int:
        return sum(piece.size for piece in self.pieces)


class Sharing(NamedTuple):
    """Each prompt begins with ``tokens`` of one of ``groups`` prefixes, drawn at random."""

    tokens: int
    groups: int


class Pace(NamedTuple):
    """An open loop. ``rate``: requests per second."""

    kind: arrivals.Kind
    rate: float
    burstiness: float


def drawn(
    mix: Sequence[Share], sharing: Sharing, pace: Pace | None, seed: int, name: str = "own"
) -> Iterator[Item]:
    """Items without end. The shared prefix counts as part of a prompt's length, which is at least
    one token longer. ``name`` keeps prompts apart that must not be alike."""
    draw = random.Random(seed)
    when = random.Random(draw.random())  # apart, so that lengths do not depend on the rate
    due = arrivals.times(*pace, when) if pace else None
    for index in count():
        prompt, output = draw_lengths(mix, draw)
        pieces = [Piece(f"{name}/{index}", max(1, prompt - sharing.tokens))]
        if sharing.tokens:
            group = draw.randrange(sharing.groups)
            pieces.insert(0, Piece(f"group/{group}", sharing.tokens))
        yield Item(index, next(due) if due else 0.0, tuple(pieces), output)


def bounded(
    items: Iterator[Item], requests: int | None, duration_s: float | None
) -> Iterator[Item]:
    """No more than ``requests``, none due after ``duration_s``."""
    if duration_s is not None:
        items = takewhile(lambda item: item.at < duration_s, items)
    return islice(items, requests)


def traced(
    lines: Sequence[Line],
    speedup: float,
    scale: float,
    context: int | None,
    name: str = "own",
) -> Iterator[Item]:
    """The trace's requests, ``speedup`` times as fast, lengths times ``scale``."""
    for index, line in enumerate(lines):
        prompt, output = fitted(line, scale, context)
        at = (line.at - lines[0].at) / speedup
        yield Item(index, at, _blocks(line.blocks, prompt, f"{name}/{index}", scale), output)


def _blocks(ids: Sequence[int], prompt: int, own: str, scale: float) -> tuple[Piece, ...]:
    """Block by block, as long as ids last; the rest, if any, is the request's own."""
    size = max(1, round(BLOCK_TOKENS * scale))
    pieces = []
    left = prompt
    for number in ids:
        if left <= 0:
            break
        pieces.append(Piece(f"block/{number}", min(size, left)))
        left -= size
    if left > 0:
        pieces.append(Piece(own, left))
    return tuple(pieces)
