"""A prefill engine's copy thread, its link and its step loop under a simulated clock.

The copy thread's classes are real; its device takes a modelled time for each copy, and the time
passes while the thread waits for commands. No time is measured, so that a busy machine changes
nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from engine.ipc import messages as m
from engine.ipc.shared_memory import Arena, ArenaShape
from engine.ipc.slot_channel import SlotReceiver
from engine.kv_cache.kv_format import Codec, KVFormat, split_into_pieces
from engine.kv_cache.kv_frames import FrameCopy
from engine.slots.copy_thread import IDLE_WAIT_S, CopyThread
from engine.slots.devices import DONE, CopyCompletion, Fetch, HostFrame

LLAMA_8B = KVFormat(
    precision="fp8", storage="fp8", layers=32, kv_heads=8, head_dim=128, element_bytes=2
)
BLOCK = 32
ROUND_TRIP_S = 200e-6


class SimulatedClock:
    """Calls that are due at some time, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), call))

    def pass_until(self, when: float) -> None:
        """Make the calls that are due until ``when``."""
        while self._due and self._due[0][0] <= when:
            self.now, _, call = heapq.heappop(self._due)
            call()
        self.now = max(self.now, when)

    def pass_to_next(self) -> bool:
        """Make the next call; return whether there was one."""
        if self._due:
            self.pass_until(self._due[0][0])
            return True
        return False


class SimulatedDevice:
    """Copies that take the time of their bytes, and move none."""

    inbound_slots = outbound_slots = batch = 1

    def __init__(self, clock: SimulatedClock, bytes_s: float) -> None:
        self._clock = clock
        self._bytes_s = bytes_s

    def bind_thread(self) -> None:
        pass

    def fence(self) -> CopyCompletion:
        return DONE

    def gather(self, frames: Sequence[HostFrame]) -> CopyCompletion:
        nbytes = sum(len(data) for data, _ in frames)
        self._clock.pass_until(self._clock.now + nbytes / self._bytes_s)
        return DONE

    def fetch(self, frames: Sequence[HostFrame]) -> Fetch:
        raise AssertionError(frames)

    def scatter(self, frame: FrameCopy) -> None:
        raise AssertionError(frame)

    def private_slots(self) -> Tensor:
        return torch.empty(1, 1, dtype=torch.uint8)

    def close(self) -> None:
        pass


class SimulatedChannel:
    """The slot commands of a front, at simulated times."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self._commands: deque[m.SlotCommand] = deque()
        self.ended = False

    def send(self, command: m.SlotCommand) -> None:
        self._commands.append(command)

    def wake(self) -> None:
        pass

    def receive(self, wait_s: float) -> list[m.SlotCommand]:
        if wait_s == IDLE_WAIT_S and not self._commands:
            self.ended = not self._clock.pass_to_next()
        received = list(self._commands)
        self._commands.clear()
        return received


class SimulatedPrefill:
    """A prefill engine with an 8B model, whose receiver is behind a link of ``link_bytes_s``. The
    front is granted a window of frames, and one more for each that has arrived."""

    def __init__(self, link_bytes_s: float, window: int, copy_bytes_s: float = 50e9) -> None:
        self.clock = SimulatedClock()
        self._rate, self._window = link_bytes_s, window
        self._link_free = 0.0
        self.channel = SimulatedChannel(self.clock)
        shape = ArenaShape(inbound=1, outbound=32)
        self.arena = Arena.create(shape)
        self.thread = CopyThread(
            LLAMA_8B,
            SimulatedDevice(self.clock, copy_bytes_s),
            self.arena,
            cast("SlotReceiver", self.channel),
            self._send,
            lambda: None,
        )
        self.arrived: dict[int, list[float]] = {}  # times of the frames, by handle
        self.complete: dict[int, float] = {}

    def offer(self, handle: int, tokens: int, frame_bytes: int) -> int:
        """Start a transfer; return its bytes."""
        size = LLAMA_8B.block_layer_bytes(Codec.FP8)
        blocks = -(-tokens // BLOCK)
        pieces = split_into_pieces(0, blocks, LLAMA_8B.layers, size, frame_bytes)
        self.thread.offer(handle, lambda _: pieces, Codec.FP8)
        self.channel.send(m.Grant(handle, self._window))
        self.arrived[handle] = []
        return blocks * LLAMA_8B.layers * size

    def compute_at(self, when: float, handle: int, tokens: int) -> None:
        """Let a step that computes the leading ``tokens`` end at ``when``."""
        blocks = -(-tokens // BLOCK)

        def publish() -> None:
            self.thread.publish([(handle, range(blocks), blocks)])

        self.clock.at(when, publish)

    def run(self) -> None:
        """Let everything happen that follows."""
        busy = False
        while not self.channel.ended:
            busy = self.thread._advance(busy)
        self.arena.release_fd()

    def _send(self, events: Sequence[m.Event]) -> None:
        for event in events:
            assert isinstance(event, m.KVFrame)
            began = max(self._link_free, self.clock.now)
            self._link_free = began + event.nbytes / self._rate
            self.clock.at(self._link_free, lambda frame=event: self._deliver(frame))  # type: ignore[misc]

    def _deliver(self, frame: m.KVFrame) -> None:
        self.channel.send(m.SlotsFree([frame.slot]))
        self.arrived[frame.handle].append(self.clock.now)
        grant = m.Grant(frame.handle, 1)
        self.clock.at(self.clock.now + ROUND_TRIP_S, lambda: self.channel.send(grant))
        if frame.last:
            self.complete[frame.handle] = self.clock.now
