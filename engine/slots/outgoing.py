"""Frames on their way from the pool into slots.

computed --steps complete--> taken from the ``EgressQueue`` --> gathering --> KVFrame
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash
from torch import Tensor

from engine.ipc import messages as m
from engine.ipc.shared_memory import Arena
from engine.kv_cache.kv_format import KVFormat
from engine.kv_cache.kv_frames import FrameCopy
from engine.slots.devices import CopyCompletion, CopyDevice, HostFrame
from engine.slots.egress import EgressQueue, OutgoingFrame


class ComputedBlocks(NamedTuple):
    """``blocks`` leading blocks of a sequence, in ``pages``, are computed with ``fence``."""

    handle: int
    pages: Sequence[int]
    blocks: int
    fence: CopyCompletion


class _Batch(NamedTuple):
    done: CopyCompletion
    frames: list[OutgoingFrame]
    staging: list[int]


class OutgoingFrames:
    """The frames that leave one pool. The copy thread owns it. ``slots`` [slots, >= slot_bytes]
    uint8 are those of ``arena``; ``send`` sends an event, and ``hear_loop`` applies what the step
    loop has said so far."""

    def __init__(
        self,
        kv: KVFormat,
        device: CopyDevice,
        arena: Arena,
        slots: Tensor,
        send: Callable[[m.Event], None],
        hear_loop: Callable[[], None],
    ) -> None:
        self._kv = kv
        self._device = device
        self._arena = arena
        self._slots = slots
        self._send = send
        self._hear_loop = hear_loop
        self.queue = EgressQueue(arena.shape.outbound_slots())
        self._computed: deque[ComputedBlocks] = deque()
        self._free = list(range(device.outbound_slots))  # of staging memory
        self._batches: deque[_Batch] = deque()

    def running(self) -> CopyCompletion | None:
        """Return the oldest copy in flight."""
        return self._batches[0].done if self._batches else None

    @property
    def awaits_steps(self) -> bool:
        """Whether blocks wait for the end of a launched step."""
        return bool(self._computed)

    def publish(self, computed: ComputedBlocks) -> None:
        """Send these blocks when their steps are complete. Fences are given in their order."""
        self._computed.append(computed)

    def advance(self) -> bool:
        """Gather frames that may be sent, and send those that lie in their slots. Return whether
        anything was done."""
        while self._computed and self._computed[0].fence.is_done():
            handle, pages, blocks, _ = self._computed.popleft()
            self.queue.publish(handle, pages, blocks)
        return self._gather() | self._send_gathered()

    def _gather(self) -> bool:
        frames: list[OutgoingFrame] = []
        while len(frames) < min(self._device.batch, len(self._free)):
            if (frame := self.queue.take()) is None:
                break
            frames.append(frame)
        if frames:
            staging = [self._free.pop() for _ in frames]
            copies = []
            for frame, slot in zip(frames, staging, strict=True):
                self._arena.begin_fill(frame.slot)
                copy = FrameCopy(slot, frame.piece, frame.pages, frame.codec)
                copies.append(HostFrame(self._bytes_of(frame), copy))
            self._batches.append(_Batch(self._device.gather(copies), frames, staging))
        return bool(frames)

    def _send_gathered(self) -> bool:
        sent = False
        while self._batches and self._batches[0].done.is_done():
            batch = self._batches.popleft()
            self._free += batch.staging
            # The step loop ends an offer before its pages can be used again. So KV that was still
            # there when it was copied is told from KV that another sequence may have written.
            self._hear_loop()
            for frame in batch.frames:
                self._send_frame(frame)
            sent = True
        return sent

    def _bytes_of(self, frame: OutgoingFrame) -> Tensor:
        """Return a frame's part [nbytes] of its slot."""
        return self._slots[frame.slot][: self._kv.piece_bytes(frame.piece, frame.codec)]

    def _send_frame(self, frame: OutgoingFrame) -> None:
        data = self._bytes_of(frame).numpy()
        checksum = int(xxhash.xxh3_64_intdigest(data.data))  # of bytes that are in the cache still
        generation = self._arena.end_fill(frame.slot)
        if not self.queue.is_open(frame.handle):
            self.queue.free([frame.slot])
            return
        where = frame.handle, frame.sequence, frame.slot, frame.piece, len(data), frame.last
        self._send(m.KVFrame(*where, generation, checksum))
