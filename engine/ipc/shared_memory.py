"""Shared memory between a front and its engine, divided into slots for KV frames.

    table  a generation (u64) for each slot
    slots  [0 .. inbound)            filled by the front, emptied by the engine
           [inbound .. slots)        filled by the engine, emptied by the front or by another engine

The table and each slot begin at a page of memory. The memory is an anonymous file whose descriptor
the engine inherits: it has no name that could be left behind, and disappears with its last process.
The side that fills slots owns the free ones. An engine on a GPU registers the memory with CUDA, for
copies beside its steps.

Another worker on the same host may read the slots through a ``PeerArena``. It is told a slot's
generation with each frame. The generation is odd while the slot is filled and rises by 2 with each
frame, so a reader that finds the same even number before and after its copy has read that frame.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from typing import NamedTuple

import msgspec

from protocol.errors import CarrierFailed

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_GENERATION_BYTES = 8

MAX_PEER_SLOTS = 4096
MAX_PEER_SLOT_BYTES = 1 << 30


class SlotLayout(NamedTuple):
    """Where the slots of an arena lie."""

    slot_bytes: int
    slots: int

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next: whole pages of memory."""
        return _whole_pages(self.slot_bytes)

    @property
    def table_bytes(self) -> int:
        """Bytes before the first slot."""
        return _whole_pages(self.slots * _GENERATION_BYTES)

    @property
    def bytes(self) -> int:
        return self.table_bytes + self.slots * self.stride

    def start(self, slot: int) -> int:
        """Return the offset of a slot. Raise ValueError if there is no such slot."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} of an arena with {self.slots} slots")
        return self.table_bytes + slot * self.stride


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class ArenaShape(msgspec.Struct, frozen=True):
    """The sizes of an arena; both processes use the same."""

    slot_bytes: int = 4 << 20
    inbound: int = 32
    outbound: int = 32

    @property
    def layout(self) -> SlotLayout:
        return SlotLayout(self.slot_bytes, self.inbound + self.outbound)

    @property
    def bytes(self) -> int:
        return self.layout.bytes

    @property
    def inbound_staging_slots(self) -> int:
        """Slots of GPU memory for incoming frames."""
        return min(self.inbound, STAGING_SLOTS)

    @property
    def outbound_staging_slots(self) -> int:
        """Slots of GPU memory for outgoing frames."""
        return min(self.outbound, STAGING_SLOTS)

    @property
    def staging_slot_bytes(self) -> int:
        """Bytes of a slot of GPU memory, a multiple of the 16 bytes of a kernel's access."""
        return -(-self.slot_bytes // 16) * 16

    @property
    def staging_bytes(self) -> int:
        """GPU memory that an engine on a GPU allocates to copy frames through."""
        slots = self.inbound_staging_slots + self.outbound_staging_slots
        return self.staging_slot_bytes * slots

    @property
    def pinned_bytes(self) -> int:
        """Host memory that an engine on a GPU registers or allocates for copies: the arena, and
        private memory for frames from other workers' arenas."""
        return self.bytes + self.slot_bytes * self.inbound_staging_slots

    def inbound_slots(self) -> list[int]:
        return list(range(self.inbound))

    def outbound_slots(self) -> list[int]:
        return list(range(self.inbound, self.inbound + self.outbound))


STAGING_SLOTS = 16
"""Slots of GPU memory for the frames of one direction. A slot is in use for some 200 us, the time
of its copy over PCIe, so that 16 of them keep two batches of copies in flight."""


class Arena:
    """One process's mapping. The front creates the memory, and the engine maps the descriptor that
    it inherits. A page of memory is allocated when a slot is first written, and all are when an
    engine on a GPU registers them."""

    def __init__(self, fd: int, shape: ArenaShape) -> None:
        self.fd = fd
        self.shape = shape
        self.layout = shape.layout
        self.map = mmap.mmap(fd, shape.bytes)
        self.view = memoryview(self.map)
        self._generations = self.view[: self.layout.table_bytes].cast("Q")

    @classmethod
    def create(cls, shape: ArenaShape) -> Arena:
        fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, shape.bytes)
        # A worker that reads this arena relies on its size: a read beyond the end of a file that
        # has shrunk would kill it (SIGBUS).
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, shape)

    def slot(self, index: int, nbytes: int) -> memoryview:
        """Return the first ``nbytes`` of a slot."""
        assert 0 <= nbytes <= self.shape.slot_bytes
        start = self.layout.start(index)
        return self.view[start : start + nbytes]

    def begin_fill(self, index: int) -> None:
        """Mark a slot as being filled: a frame that is still read from it is no longer valid."""
        assert self._generations[index] % 2 == 0
        self._generations[index] += 1

    def end_fill(self, index: int) -> int:
        """Mark a slot as filled, and return the generation of its content."""
        assert self._generations[index] % 2 == 1
        self._generations[index] += 1
        return self._generations[index]

    def generation(self, index: int) -> int:
        return self._generations[index]

    def readonly_fd(self) -> int:
        """Return a new descriptor of the memory that allows reading alone, for another worker. The
        caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def release_fd(self) -> None:
        """Close the descriptor but keep the mapping. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class PeerArena:
    """A mapping of another worker's arena, for reading. The copy thread creates it from a
    descriptor that the other worker has sent, and nothing in it is trusted."""

    def __init__(self, fd: int, layout: SlotLayout) -> None:
        """Map the arena, and close ``fd``. Raise CarrierFailed if the file is not sealed, too
        small, or not shared memory."""
        try:
            _check_peer_file(fd, layout)
            self._map = mmap.mmap(fd, layout.bytes, prot=mmap.PROT_READ)
        except OSError as error:
            raise CarrierFailed(f"another worker's arena cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        self._layout = layout
        self._view = memoryview(self._map)
        self._generations = self._view[: layout.table_bytes].cast("Q")

    def slot(self, index: int, nbytes: int) -> memoryview:
        """Return the first ``nbytes`` of a slot. Raise ValueError if they are not all there."""
        if not 0 < nbytes <= self._layout.slot_bytes:
            raise ValueError(f"{nbytes} bytes of a slot of {self._layout.slot_bytes}")
        start = self._layout.start(index)
        return self._view[start : start + nbytes]

    def generation(self, index: int) -> int:
        return self._generations[index]

    def close(self) -> None:
        """Unmap the arena. No view of a slot may be in use."""
        self._generations.release()
        self._view.release()
        self._map.close()


def _check_peer_file(fd: int, layout: SlotLayout) -> None:
    """Raise CarrierFailed or OSError unless ``fd`` is shared memory that cannot shrink and holds
    the arena."""
    if not (0 < layout.slot_bytes <= MAX_PEER_SLOT_BYTES and 0 < layout.slots <= MAX_PEER_SLOTS):
        raise CarrierFailed(
            f"another worker's arena would have {layout.slots} slots of {layout.slot_bytes} bytes"
        )
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # fails for any file that is not shared memory
    if not seals & fcntl.F_SEAL_SHRINK:
        raise CarrierFailed("another worker's arena is not sealed against shrinking")
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_size < layout.bytes:
        raise CarrierFailed(
            f"another worker's arena has {info.st_size} bytes; {layout.slots} slots of"
            f" {layout.slot_bytes} bytes take {layout.bytes}"
        )
