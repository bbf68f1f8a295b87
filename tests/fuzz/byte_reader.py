"""``ByteReader``: the choices of a structured fuzz target, read from the bytes of its input."""

from __future__ import annotations

import itertools


class ByteReader:
    """Reads numbers, pieces and texts from an input; at its end everything is zero or empty."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Number of bytes that were not read."""
        return len(self._data) - self._at

    def number(self, below: int) -> int:
        """Return a number from 0 to ``below`` - 1."""
        size = max(1, (below.bit_length() + 7) // 8)
        return int.from_bytes(self.take(size), "little") % below

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes, fewer at the end."""
        piece = self._data[self._at : self._at + size]
        self._at += len(piece)
        return piece

    def piece(self, most: int = 255) -> bytes:
        """Return a piece whose length the input chooses."""
        return self.take(self.number(most + 1))

    def rest(self) -> bytes:
        """Return all that is left."""
        return self.take(self.left)

    def text(self, size: int) -> str:
        """Return the next ``size`` bytes as text, whatever they are."""
        return self.take(size).decode("utf-8", "replace")


def cut(data: bytes, reader: ByteReader, most: int = 64) -> list[bytes]:
    """Return ``data`` in pieces; the reader chooses where it is cut, at up to ``most`` places."""
    places = _places(len(data), reader, most)
    return [data[a:b] for a, b in itertools.pairwise(places)]


def cut_text(text: str, reader: ByteReader, most: int = 64) -> list[str]:
    """Return ``text`` in pieces, likewise."""
    places = _places(len(text), reader, most)
    return [text[a:b] for a, b in itertools.pairwise(places)]


def _places(size: int, reader: ByteReader, most: int) -> list[int]:
    places = [0]
    while reader.left and len(places) <= most and places[-1] < size:
        places.append(min(size, places[-1] + 1 + reader.number(255)))
    return [*places, size]
