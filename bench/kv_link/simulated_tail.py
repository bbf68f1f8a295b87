"""A transfer of a paced prefill in simulated time, with the real queues and credits.

    steps of P --> EgressQueue --> copy to a slot --> link --> slot of D --> copy to the pool
                       ^                                                          |
                       +---- credits <---- InboundSlots, CreditWindow <-----------+

Copies and the link take the time of their bytes, and each message a constant time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from bench.kv_link.product.shapes import KVShape
from engine.ipc.shared_memory import ArenaShape
from engine.kv_cache.kv_format import Codec, split_into_pieces
from engine.process.session import EngineSession
from engine.slots.egress import EgressQueue, OutgoingFrame
from kvtransfer.credits import CreditWindow, InboundSlots

COPY_BYTES_S: Final = 20e9
"""Of a copy between pool and slot, checksum included: PCIe 4 with 16 lanes."""

MESSAGE_S: Final = 200e-6
"""Of a message from one front to the other, or between a front and its engine."""

_HANDLE = 1


class SimulatedTime:
    """Calls that are due at some time, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), call))

    def run(self) -> None:
        """Make all calls, and those that they ask for."""
        while self._due:
            self.now, _, call = heapq.heappop(self._due)
            call()


class _Resource:
    """What does one thing after another: a link, or a copy engine."""

    def __init__(self, time: SimulatedTime, bytes_s: float) -> None:
        self._time = time
        self._bytes_s = bytes_s
        self._free_at = 0.0

    def use(self, nbytes: int, then: Callable[[], None]) -> None:
        """Call ``then`` when ``nbytes`` bytes have passed after all earlier ones."""
        self._free_at = max(self._free_at, self._time.now) + nbytes / self._bytes_s
        self._time.after(self._free_at - self._time.now, then)


@dataclass
class _Arena:
    shape: ArenaShape = field(default_factory=ArenaShape)


class _Session:
    """The receiver's session, as far as ``InboundSlots`` uses one."""

    def __init__(self) -> None:
        self.arena = _Arena()
        self.inbound = self.arena.shape.inbound_slots()
        self.on_inbound_free: Callable[[], None] = lambda: None


class SimulatedTransfer:
    """One transfer of ``blocks`` blocks, whose steps end as ``steps`` says: (seconds, blocks)."""

    def __init__(
        self,
        shape: KVShape,
        link_bytes_s: float,
        frame_bytes: int,
        steps: Sequence[tuple[float, int]],
    ) -> None:
        self._kv = shape.kv_format
        self._time = SimulatedTime()
        self._link = _Resource(self._time, link_bytes_s)
        self._reading = _Resource(self._time, COPY_BYTES_S)
        self._writing = _Resource(self._time, COPY_BYTES_S)
        self._steps = steps
        blocks = steps[-1][1]
        size = self._kv.block_layer_bytes(Codec.RAW)
        self._pieces = split_into_pieces(0, blocks, self._kv.layers, size, frame_bytes)
        self._session = _Session()
        self._egress = EgressQueue(ArenaShape().outbound_slots())
        self._egress.offer(_HANDLE, lambda _: self._pieces, Codec.RAW)
        self._window = CreditWindow(len(self._pieces), lambda: self._time.now)
        self._slots = InboundSlots(cast("EngineSession", self._session))
        self._granted: list[int] = []  # slots of D without a frame
        self._written = 0
        self._ended_s = 0.0

    def tail_s(self) -> float:
        """Return the seconds from the end of the last step until all KV is written."""
        self._slots.add(self._window, self._on_granted)
        for seconds, blocks in self._steps:
            self._time.after(seconds, lambda blocks=blocks: self._compute(blocks))  # type: ignore[misc]
        self._time.run()
        if self._written < len(self._pieces):
            raise RuntimeError(f"{self._written} of {len(self._pieces)} frames were written")
        return self._ended_s - self._steps[-1][0]

    # ---- the sender -------------------------------------------------------------------------

    def _compute(self, blocks: int) -> None:
        self._egress.publish(_HANDLE, range(blocks), blocks)
        self._send()
        due = sum(piece.block + piece.blocks <= blocks for piece in self._pieces)
        self._time.after(2 * MESSAGE_S, lambda: self._set_due(due))

    def _send(self) -> None:
        """Copy every frame that has a slot and a credit, then put it on the link."""
        while (frame := self._egress.take()) is not None:
            self._reading.use(self._bytes(frame), lambda frame=frame: self._carry(frame))  # type: ignore[misc]

    def _carry(self, frame: OutgoingFrame) -> None:
        def carry() -> None:
            self._link.use(self._bytes(frame), lambda: self._arrive(frame))

        self._time.after(MESSAGE_S, carry)  # the engine tells its front

    def _bytes(self, frame: OutgoingFrame) -> int:
        return self._kv.piece_bytes(frame.piece, frame.codec)

    # ---- the receiver -----------------------------------------------------------------------

    def _set_due(self, frames: int) -> None:
        self._window.set_due(frames)
        self._slots.serve()

    def _on_granted(self, slot: int) -> None:
        self._granted.append(slot)
        self._time.after(2 * MESSAGE_S, self._grant)  # to the other front, and to its engine

    def _grant(self) -> None:
        self._egress.grant(_HANDLE, 1)
        self._send()

    def _arrive(self, frame: OutgoingFrame) -> None:
        slot = self._granted.pop()
        self._window.arrive()
        self._slots.serve()
        self._time.after(MESSAGE_S, lambda: self._free_slots([frame.slot]))
        self._time.after(
            MESSAGE_S, lambda: self._writing.use(self._bytes(frame), lambda: self._write(slot))
        )

    def _free_slots(self, slots: list[int]) -> None:
        self._egress.free(slots)
        self._send()

    def _write(self, slot: int) -> None:
        self._written += 1
        self._ended_s = self._time.now
        self._time.after(MESSAGE_S, lambda: self._slots.release([slot]))
