"""A copy device whose copies end when the test says so, and then move real bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.execution.engine import Engine
from engine.kv_cache.kv_format import Codec
from engine.kv_cache.kv_frames import FrameCopy, FrameDefect
from engine.kv_cache.kv_pool import make_pool
from engine.slots.devices import CopyCompletion, HostFrame
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
        assert self._done, "nothing must wait"

    def defects(self) -> Sequence[int]:
        assert self._done
        return self.found

    def finish(self) -> None:
        assert not self._done
        self._effect()
        self._done = True


class FakeCopyDevice:
    """Copies over a fake PCIe take effect when they are finished; a scatter takes effect at once.
    It checks that no staging slot is used twice at a time. ``steps`` are the fences that were given
    out; they are complete unless ``steps_run`` is set."""

    def __init__(self, engine: Engine, slots: Tensor, staging_slots: int = 4) -> None:
        self.inbound_slots = self.outbound_slots = self.batch = staging_slots
        self.closed = False
        self.steps_run = False
        self._engine = engine
        self._staging = torch.zeros(staging_slots, slots.shape[1], dtype=torch.uint8)
        self._private = torch.zeros_like(self._staging)
        self.steps: list[FakeWork] = []
        self.fetches: list[FakeWork] = []
        self.gathers: list[FakeWork] = []
        self.scattered: list[FrameCopy] = []

    def bind_thread(self) -> None:
        pass

    def fence(self) -> CopyCompletion:
        work = FakeWork()
        self.steps.append(work)
        if not self.steps_run:
            work.finish()
        return work

    def fetch(self, frames: Sequence[HostFrame]) -> FakeWork:
        def copy() -> None:
            for data, target in frames:
                self._staging[target.slot, : len(data)] = data
                work.found.append(self._check(target, len(data)))

        work = FakeWork(copy, self._take([frame.copy for frame in frames], self.fetches))
        self.fetches.append(work)
        return work

    @staticmethod
    def _take(frames: Sequence[FrameCopy], running: list[FakeWork]) -> list[int]:
        taken = {frame.slot for frame in frames}
        in_use = [work.staging for work in running if not work.is_done()]
        assert len(taken) == len(frames) and taken.isdisjoint(set().union(*in_use))
        return [*taken]

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

    def scatter(self, frame: FrameCopy) -> None:
        nbytes = self._engine.format.piece_bytes(frame.piece, frame.codec)
        data = self._staging[frame.slot, :nbytes].clone()
        self._engine.pool.write(frame.piece, frame.pages, data, frame.codec)
        self.scattered.append(frame)

    def gather(self, frames: Sequence[HostFrame]) -> FakeWork:
        staged = []
        for target, copy in frames:
            data = torch.zeros(len(target), dtype=torch.uint8)
            assert self._engine.pool.read(copy.piece, copy.pages, data, copy.codec) == len(target)
            staged.append((target, data))

        def copy_out() -> None:
            for target, data in staged:
                target[:] = data

        work = FakeWork(copy_out, self._take([frame.copy for frame in frames], self.gathers))
        self.gathers.append(work)
        return work

    def private_slots(self) -> Tensor:
        return self._private

    def close(self) -> None:
        self.closed = True

    def finish_all(self) -> None:
        """Finish everything that has been started."""
        for work in self.steps + self.fetches + self.gathers:
            if not work.is_done():
                work.finish()
