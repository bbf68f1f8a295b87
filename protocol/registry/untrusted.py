"""Decodes the value of a Redis key to a record, or to None if the bytes are invalid.

Whoever can write to Redis can put anything there, and so can a program of another version. Every
reader of msgpack from Redis decodes by ``decode_untrusted``.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec

MAX_RECORD_BYTES = 16 << 10
"""More than any record has. Readers fetch one byte more at most, so that a large value costs no
time on the event loop."""

T_co = TypeVar("T_co", covariant=True)


class RecordDecoder(Protocol[T_co]):
    """A decoder of msgspec."""

    def decode(self, buf: bytes, /) -> T_co:
        """Return the object in ``buf``, or raise."""


def decode_untrusted(
    decoder: RecordDecoder[T_co], data: object, max_bytes: int = MAX_RECORD_BYTES
) -> T_co | None:
    """Return the object in ``data``, a reply of Redis; None unless it is a string of at most
    ``max_bytes`` with a valid object.

    Beside its own errors and those of UTF-8, msgspec raises RecursionError for values that are
    nested 1,000 deep, which take 1 kB."""
    if not isinstance(data, bytes) or not 0 < len(data) <= max_bytes:
        return None
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError):
        return None
