"""Shared memory between a front and its engine: slots for KV frames. Torch-free.

    slots  [0 .. inbound)            filled by the front, emptied by the engine
           [inbound .. slots)        filled by the engine, emptied by the front

An anonymous memory file whose descriptor the engine inherits: it has no name that could be left
behind, and it is gone with its last process. Whoever fills a slot owns the free ones of its side.
"""

from __future__ import annotations

import mmap
import os

import msgspec


class ArenaShape(msgspec.Struct, frozen=True):
    """Sizes; the same on both ends."""

    slot_bytes: int = 1 << 20
    inbound: int = 64
    outbound: int = 64

    @property
    def bytes(self) -> int:
        return self.slot_bytes * (self.inbound + self.outbound)

    def inbound_slots(self) -> list[int]:
        return list(range(self.inbound))

    def outbound_slots(self) -> list[int]:
        return list(range(self.inbound, self.inbound + self.outbound))


class Arena:
    """The mapping. Memory is taken from the system when a slot is first written."""

    def __init__(self, fd: int, shape: ArenaShape) -> None:
        self.fd = fd
        self.shape = shape
        self.map = mmap.mmap(fd, shape.bytes)
        self.view = memoryview(self.map)

    @classmethod
    def create(cls, shape: ArenaShape) -> Arena:
        fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
        os.ftruncate(fd, shape.bytes)
        return cls(fd, shape)

    def slot(self, index: int, nbytes: int) -> memoryview:
        """The first ``nbytes`` of a slot."""
        assert 0 <= nbytes <= self.shape.slot_bytes
        start = index * self.shape.slot_bytes
        return self.view[start : start + nbytes]

    def release_fd(self) -> None:
        """The mapping stays; call once every process that shall map it has the descriptor."""
        os.close(self.fd)
        self.fd = -1
