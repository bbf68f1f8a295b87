"""Frames that are read from the arenas of other workers on this host.

A frame is copied to private memory first, and checked there: its owner could change it at any time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

from engine.ipc import messages as m
from engine.ipc.shared_memory import PeerArena, SlotLayout
from protocol.errors import CarrierFailed, TransferFailed

_PORTION_BYTES = 1 << 20
"""Bytes that are copied and then hashed while they are in the cache. Each portion takes the
interpreter lock twice: with 256 KiB, frames of 4 MiB took 1.6 times as long."""

Bytes = npt.NDArray[np.uint8]


class PeerSlots:
    """The mapped arenas of other workers. The copy thread owns it."""

    def __init__(self) -> None:
        self._arenas: dict[int, PeerArena | CarrierFailed] = {}

    def map(self, command: m.MapArena, take_descriptor: Callable[[], int]) -> None:
        """Map an arena. If that fails, its frames fail, with the reason."""
        self.unmap(command.arena)
        try:
            fd = take_descriptor()
            arena = PeerArena(fd, SlotLayout(command.slot_bytes, command.slots))
            self._arenas[command.arena] = arena
        except LookupError as error:
            self._arenas[command.arena] = CarrierFailed(str(error))
        except CarrierFailed as error:
            self._arenas[command.arena] = error

    def unmap(self, arena: int) -> None:
        """Forget an arena; unknown ones are ignored."""
        known = self._arenas.pop(arena, None)
        if isinstance(known, PeerArena):
            known.close()

    def close(self) -> None:
        for arena in list(self._arenas):
            self.unmap(arena)

    def copy(self, command: m.Ingest, out: Bytes) -> None:
        """Copy the frame of ``command`` into ``out`` [bytes]. Raise TransferFailed if it is not the
        frame that was sent, and CarrierFailed if its arena cannot be read."""
        arena = self._arenas.get(command.arena)
        if arena is None:
            raise CarrierFailed(f"arena {command.arena} of another worker is not mapped")
        if isinstance(arena, CarrierFailed):
            raise CarrierFailed(str(arena))
        try:
            before = arena.generation(command.slot)
            with arena.slot(command.slot, command.nbytes) as view:
                checksum = copy_and_hash(np.frombuffer(view, dtype=np.uint8), out)
            after = arena.generation(command.slot)
        except (ValueError, IndexError) as error:
            raise CarrierFailed(f"a frame is not in its arena: {error}") from error
        if not before == after == command.generation:
            raise TransferFailed(
                f"slot {command.slot} of another worker was filled again before it was read:"
                f" generation {after}, expected {command.generation}"
            )
        if checksum != command.checksum:
            raise TransferFailed("a frame has another checksum than the one that was sent with it")


def copy_and_hash(source: Bytes, out: Bytes) -> int:
    """Copy ``source`` [bytes] to ``out`` [bytes], and return the XXH3 (64 bits) of the copy."""
    assert source.shape == out.shape
    digest = xxhash.xxh3_64()
    for start in range(0, len(source), _PORTION_BYTES):
        portion = out[start : start + _PORTION_BYTES]
        np.copyto(portion, source[start : start + _PORTION_BYTES])
        digest.update(portion.data)  # both release the interpreter lock
    return int(digest.intdigest())
