"""A copy device whose copies end when the test says so, and then move real bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.execution.engine import Engine
from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec
from engine.kv_cache.kv_pool import FrameCopy, FrameDefect, make_pool
from engine.process.slot_copies import ArenaFrame, CopyCompletion
from protocol.errors import TransferFailed


class FakeWork:
    """Work of a stream that ends, and takes effect, with ``finish``."""

    def __init__(
        self, effect: Callable[[], None] = lambda: None, staging: Sequence[int] = ()
    ) -> None:
        self.staging = set(staging)  # slots that it reads or writes
        self._effect = effect
        self._done = False
        self.found: list[int] = []  # defects, of a fetch

    def is_done(self) -> bool:
        return self._done

    def wait(self) -> None:
        assert self._done, "the loop must not wait"

    def defects(self) -> Sequence[int]:
        assert self._done
        return self.found

    def finish(self) -> None:
        assert not self._done
        self._effect()
        self._done = True


class FakeCopyDevice:
    """Copies over a fake PCIe take effect when they are finished; scatter and gather take effect at
    once, as in the order of one stream with the steps. It checks that no staging slot is used twice
    at a time, and that outgoing slots are distinct."""

    def __init__(self, engine: Engine, slots: Tensor, inbound_slots: int = 4) -> None:
        self.inbound_slots = inbound_slots
        self.closed = False
        self._engine = engine
        self._slots = slots
        self._staging = torch.zeros(inbound_slots, slots.shape[1], dtype=torch.uint8)
        self.fetches: list[FakeWork] = []
        self.scatters: list[FakeWork] = []
        self.gathers: list[FakeWork] = []
        self.scattered: list[FrameCopy] = []

    def fetch(self, frames: Sequence[ArenaFrame]) -> FakeWork:
        def copy() -> None:
            for slot, nbytes, target in frames:
                self._staging[target.slot, :nbytes] = self._slots[slot, :nbytes]
                work.found.append(self._check(target, nbytes))

        taken = {frame.copy.slot for frame in frames}
        running = [w.staging for w in self.fetches + self.scatters if not w.is_done()]
        assert len(taken) == len(frames) and taken.isdisjoint(set().union(*running))
        work = FakeWork(copy, [*taken])
        self.fetches.append(work)
        return work

    def _check(self, frame: FrameCopy, nbytes: int) -> int:
        """Find defects as the pool does, in an engine of its own."""
        pool = self._engine.pool
        scratch = make_pool(pool.format, frame.piece.blocks, pool.dtype, torch.device("cpu"))
        pages = list(range(frame.piece.blocks))
        try:
            scratch.write(frame.piece, pages, self._staging[frame.slot, :nbytes], frame.codec)
        except TransferFailed:
            fp8 = frame.codec is Codec.FP8
            return int(FrameDefect.SCALE if fp8 else FrameDefect.VALUE)
        return 0

    def scatter(self, frames: Sequence[FrameCopy]) -> FakeWork:
        for frame in frames:
            nbytes = frame.piece.bytes(self._engine.format.page_layer_bytes(frame.codec))
            data = self._staging[frame.slot, :nbytes].clone()
            self._engine.pool.write(frame.piece, frame.pages, data, frame.codec)
        self.scattered += frames
        work = FakeWork(staging=[frame.slot for frame in frames])
        self.scatters.append(work)
        return work

    def gather(self, frames: Sequence[ArenaFrame]) -> FakeWork:
        staged = []
        for slot, nbytes, copy in frames:
            data = torch.zeros(nbytes, dtype=torch.uint8)
            assert self._engine.pool.read(copy.piece, copy.pages, data, copy.codec) == nbytes
            staged.append((slot, data))
        assert len({slot for slot, _ in staged}) == len(staged)

        def copy_out() -> None:
            for slot, data in staged:
                self._slots[slot, : len(data)] = data

        work = FakeWork(copy_out)
        self.gathers.append(work)
        return work

    def close(self) -> None:
        self.closed = True

    def finish_all(self) -> None:
        """Finish everything that has been started."""
        for work in self.fetches + self.scatters + self.gathers:
            if not work.is_done():
                work.finish()


class FakeSender:
    """Sends what is complete when ``deliver`` is called, the first first, as its thread does."""

    def __init__(self) -> None:
        self._queue: list[tuple[CopyCompletion, Sequence[m.Event]]] = []
        self.closed = False

    def send_after(self, done: CopyCompletion, events: Sequence[m.Event]) -> None:
        self._queue.append((done, events))

    def deliver(self) -> list[m.Event]:
        out: list[m.Event] = []
        while self._queue and self._queue[0][0].is_done():
            out += self._queue.pop(0)[1]
        return out

    def close(self) -> None:
        self.closed = True
