"""Changes of inputs: the Hypothesis strategy, atheris' mutator and the plain driver share them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.fuzz.target import LARGEST_INPUT

_INTERESTING = (
    *(b"\0", b"\xff", b"\x7f", b"\xff\xff\xff\xff", b"\0\0\0\x80", b"[", b"{", b'"', b"\\", b"-"),
    *(b"1e999", b"9" * 400, b"null", b"NaN", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"\r\n", b"&a "),
    *(b"\\ud800", b"true", b"0", b": ", b"*a"),
)


def mutate(
    data: bytes, others: Sequence[bytes], random: Random, most: int = LARGEST_INPUT
) -> bytes:
    """Return ``data`` with one to four changes, at most ``most`` bytes; ``others`` are inputs to
    take pieces from."""
    for _ in range(1 + random.randrange(4)):
        data = random.choice(_CHANGES)(data, others, random)[:most]
    return data


def _flip(data: bytes, _others: Sequence[bytes], random: Random) -> bytes:
    if not data:
        return b"\0"
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]


def _insert(data: bytes, _others: Sequence[bytes], random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + random.choice(_INTERESTING) + data[at + random.randrange(4) :]


def _delete(data: bytes, _others: Sequence[bytes], random: Random) -> bytes:
    start, end = _span(data, random)
    return data[:start] + data[end:]


def _splice(data: bytes, others: Sequence[bytes], random: Random) -> bytes:
    other = random.choice(others) if others else data
    start, end = _span(other, random)
    at = random.randrange(len(data) + 1)
    return data[:at] + other[start:end] + data[at:]


def _repeat(data: bytes, _others: Sequence[bytes], random: Random) -> bytes:
    """Repeat a piece up to the largest size, which shows what is not linear."""
    start, end = _span(data, random)
    room = max(0, LARGEST_INPUT - len(data)) // max(1, end - start)
    times = min(room, int(2 ** random.uniform(1, 16)))
    return data[:start] + data[start:end] * times + data[start:]


def _span(data: bytes, random: Random) -> tuple[int, int]:
    start = random.randrange(len(data) + 1)
    longest = random.choice((1, 4, 16, 64, len(data)))
    return start, min(len(data), start + 1 + random.randrange(max(1, longest)))


_CHANGES = (_flip, _flip, _insert, _insert, _delete, _splice, _repeat)
