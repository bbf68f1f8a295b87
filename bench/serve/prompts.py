"""Prompts of an exact size, made when they are due, cheaply: slices of a pool that is encoded once.

A pool has units: token ids as JSON writes them, or pieces of text. A piece of a prompt is a few
units drawn by its key, which make it like no other, and then a stretch of the pool.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from bench.serve.plan import Piece
from protocol.errors import StartupError

POOL_UNITS = 1 << 16
HEADER_UNITS = 8
"""Of 1,000 units or more: 2 ** 79 headers."""

WORDS = (
    "the of and to in is that it was for on are with as his they be at one have this from or"
    " had by hot but some what there we can out other were all your when up use word how said"
    " an each she which do their time if will way about many then them would write like so"
    " these her long make thing see him two has look more day could go come did my sound no"
    " most number who over know water than call first people may down side been now find"
)


class Pool(NamedTuple):
    """``ids``: its units are token ids, else text that needs no escaping in JSON."""

    ids: bool
    joined: bytes
    ends: Sequence[int]  # of each unit within joined; a comma before every id
    note: str  # how exact the sizes are

    def unit(self, index: int) -> bytes:
        return self.stretch(index, 1)

    def stretch(self, start: int, size: int) -> bytes:
        first = self.ends[start - 1] if start else 0
        return self.joined[first : self.ends[start + size - 1]]


def _pool(units: Iterable[bytes], ids: bool, note: str) -> Pool:
    listed = list(units)
    return Pool(ids, b"".join(listed), list(accumulate(map(len, listed))), note)


def id_pool(low: int, high: int) -> Pool:
    """Ids drawn from [low, high], for a server whose tokenizer is not at hand."""
    draw = random.Random(0)
    units = (b",%d" % draw.randint(low, high) for _ in range(POOL_UNITS))
    return _pool(units, True, f"random token ids {low} to {high}: exact")


def word_pool() -> Pool:
    """Frequent English words: most tokenizers have one token for each."""
    draw, words = random.Random(0), WORDS.split()
    units = (b" " + draw.choice(words).encode() for _ in range(POOL_UNITS))
    return _pool(units, False, "words, each taken for a token: what the server counts may differ")


def tokenizer_pool(folder: Path, ids: bool) -> Pool:
    """Random text as the tokenizer in a model folder splits it. Raises StartupError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise StartupError(f"--model-dir: expected a tokenizer.json in {folder}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises no narrower type
        raise StartupError(f"--model-dir: {path} cannot be read: {e}") from None
    text = _text()
    found = tokenizer.encode(text, add_special_tokens=False)
    if ids:
        return _pool((b",%d" % i for i in found.ids), True, "random text's token ids: exact")
    cuts = [0, *(end for _, end in found.offsets)]
    pieces = (text[a:b].encode() for a, b in pairwise(cuts))
    note = "random text; a prompt may differ by a few tokens, and by what a chat template adds"
    return _pool(pieces, False, note)


def _text() -> str:
    """Words of 2 to 9 letters, vowels and consonants in turn."""
    draw = random.Random(0)
    sounds = ("aeiou", "bcdfghklmnprstvz")
    words = []
    for _ in range(POOL_UNITS // 3):
        turn = draw.randrange(2)
        words.append(
            "".join(draw.choice(sounds[(turn + i) % 2]) for i in range(draw.randint(2, 9)))
        )
    return " ".join(words)


class Prompts:
    """Writes prompts as JSON. ``salt``: nothing that was cached under another one is found."""

    def __init__(self, pool: Pool, salt: str) -> None:
        assert len(pool.ends) > HEADER_UNITS
        self.pool = pool
        self._salt = salt

    def json(self, pieces: Iterable[Piece]) -> bytes:
        """An array of token ids, or a string."""
        body = b"".join(map(self._piece, pieces))
        return b"[" + body[1:] + b"]" if self.pool.ids else b'"' + body + b'"'

    def _piece(self, piece: Piece) -> bytes:
        draw = random.Random(f"{self._salt}/{piece.key}")
        units = len(self.pool.ends)
        header = [self.pool.unit(draw.randrange(units)) for _ in range(HEADER_UNITS)]
        parts = header[: piece.size]
        place, left = draw.randrange(units), piece.size - len(parts)
        while left:
            size = min(left, units - place)
            parts.append(self.pool.stretch(place, size))
            left, place = left - size, 0
        return b"".join(parts)
