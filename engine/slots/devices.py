"""What copies frames between slots, staging memory and the pool, and the CPU's way of doing it.

    fetch    host bytes --> staging memory, and the check for defects
    scatter  staging memory --> pages
    gather   pages --> staging memory --> slot

The copy thread calls a device, ``bind_thread`` first, except for ``fence``, which the step loop
calls. On a CPU there is no staging memory: every copy takes place in its call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.ipc.shared_memory import Arena
from engine.kv_cache.kv_frames import FrameCopy
from engine.kv_cache.kv_pool import KVPool


def arena_slots(arena: Arena) -> Tensor:
    """Return the slots of an arena, [slots, slot_bytes] uint8. Rows are ``stride`` bytes apart."""
    layout = arena.layout
    rows = torch.frombuffer(arena.map, dtype=torch.uint8)[layout.table_bytes :]
    return rows.view(layout.slots, layout.stride)[:, : layout.slot_bytes]


class CopyCompletion(Protocol):
    """The end of work on a GPU stream."""

    def is_done(self) -> bool:
        """Return whether the work is complete."""

    def wait(self) -> None:
        """Block the calling thread, not the interpreter, until the work is complete."""


class Fetch(CopyCompletion, Protocol):
    """Frames on their way to staging memory."""

    def defects(self) -> Sequence[int]:
        """Return the ``FrameDefect`` of each frame. The work must be complete."""


class HostFrame(NamedTuple):
    """A frame in host memory, ``data`` [bytes] uint8, and its place in staging memory and pool."""

    data: Tensor
    copy: FrameCopy


class CopyDevice(Protocol):
    """Copies frames for one copy thread, beside the steps."""

    inbound_slots: int  # of staging memory
    outbound_slots: int
    batch: int  # frames that are copied by one call

    def bind_thread(self) -> None:
        """Make the device the calling thread's own."""

    def fence(self) -> CopyCompletion:
        """Return the end of all steps that have been launched so far."""

    def fetch(self, frames: Sequence[HostFrame]) -> Fetch:
        """Copy frames to their slots of staging memory, and check them there."""

    def scatter(self, frame: FrameCopy) -> None:
        """Copy a fetched frame to its pages, and return when it is there. Raise TransferFailed for
        defects that ``fetch`` has not reported."""

    def gather(self, frames: Sequence[HostFrame]) -> CopyCompletion:
        """Copy pages to ``data``, through slots of staging memory."""

    def private_slots(self) -> Tensor:
        """Return host memory [inbound_slots, slot_bytes] uint8 for frames of other arenas."""

    def close(self) -> None:
        """Wait for all copies, and release memory."""


class _Done:
    """Work that was complete when its call returned."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Unchecked(_Done):
    """Frames that stay where they are, and are checked when they are written."""

    def __init__(self, frames: int) -> None:
        self._frames = frames

    def defects(self) -> Sequence[int]:
        return [0] * self._frames


DONE: CopyCompletion = _Done()


class CpuCopies:
    """Copies between slots and a pool in the same kind of memory. ``private`` [1, slot_bytes]."""

    inbound_slots = outbound_slots = batch = 1

    def __init__(self, pool: KVPool, private: Tensor) -> None:
        self._pool = pool
        self._private = private
        self._fetched: dict[int, Tensor] = {}  # by slot

    def bind_thread(self) -> None:
        pass

    def fence(self) -> CopyCompletion:
        return DONE  # a step is complete when its call returns

    def fetch(self, frames: Sequence[HostFrame]) -> Fetch:
        self._fetched = {frame.copy.slot: frame.data for frame in frames}
        return _Unchecked(len(frames))

    def scatter(self, frame: FrameCopy) -> None:
        self._pool.write(frame.piece, frame.pages, self._fetched[frame.slot], frame.codec)

    def gather(self, frames: Sequence[HostFrame]) -> CopyCompletion:
        for data, copy in frames:
            self._pool.read(copy.piece, copy.pages, data, copy.codec)
        return DONE

    def private_slots(self) -> Tensor:
        return self._private

    def close(self) -> None:
        self._fetched.clear()
