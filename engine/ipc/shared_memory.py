"""Shared memory between a front and its engine, divided into slots for KV frames.

    slots  [0 .. inbound)            filled by the front, emptied by the engine
           [inbound .. slots)        filled by the engine, emptied by the front

The memory is an anonymous file whose descriptor the engine inherits: it has no name that could be
left behind, and disappears with its last process. The side that fills slots owns the free ones.
An engine on a GPU registers the memory with CUDA, for copies beside its steps.
"""

from __future__ import annotations

import mmap
import os

import msgspec


class ArenaShape(msgspec.Struct, frozen=True):
    """The sizes of an arena; both processes use the same."""

    slot_bytes: int = 1 << 20
    inbound: int = 64
    outbound: int = 64

    @property
    def bytes(self) -> int:
        return self.slot_bytes * (self.inbound + self.outbound)

    @property
    def inbound_staging_slots(self) -> int:
        """Slots of GPU memory for incoming frames. They are more than those of the arena, which are
        free after the copy to the GPU; these are free after the step in progress."""
        return 2 * self.inbound

    @property
    def staging_slot_bytes(self) -> int:
        """Bytes of a slot of GPU memory, a multiple of the 16 bytes of a kernel's access."""
        return -(-self.slot_bytes // 16) * 16

    @property
    def staging_bytes(self) -> int:
        """GPU memory that an engine on a GPU allocates to copy frames through."""
        return self.staging_slot_bytes * (self.inbound_staging_slots + self.outbound)

    def inbound_slots(self) -> list[int]:
        return list(range(self.inbound))

    def outbound_slots(self) -> list[int]:
        return list(range(self.inbound, self.inbound + self.outbound))


class Arena:
    """One process's mapping. The front creates the memory, and the engine maps the descriptor that
    it inherits. A page of memory is allocated when a slot is first written, and all are when an
    engine on a GPU registers them."""

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
        """Return the first ``nbytes`` of a slot."""
        assert 0 <= nbytes <= self.shape.slot_bytes
        start = index * self.shape.slot_bytes
        return self.view[start : start + nbytes]

    def release_fd(self) -> None:
        """Close the descriptor but keep the mapping. Call it when all processes have mapped it."""
        os.close(self.fd)
        self.fd = -1
