"""Buffers of the bare media, and their digests. This module needs the standard library alone."""

from __future__ import annotations

import mmap
import random
import zlib
from typing import Final

MIB: Final = 1 << 20
GIGABYTE: Final = 1e9
LARGEST: Final = 256 * MIB
"""Bytes of the largest transfer; each bare medium has one buffer of this size at each end."""


def make_buffer(sending: bool) -> memoryview:
    """Return a buffer of LARGEST bytes whose memory is there: random at the sender, so that no
    zero page stands for it, and else zeros."""
    buffer = memoryview(mmap.mmap(-1, LARGEST))
    part = random.Random(LARGEST).randbytes(MIB) if sending else bytes(MIB)
    for start in range(0, LARGEST, MIB):
        buffer[start : start + MIB] = part
        if sending:
            buffer[start : start + 8] = start.to_bytes(8, "little")
    return buffer


def digest(buffer: memoryview) -> int:
    return zlib.crc32(buffer)
