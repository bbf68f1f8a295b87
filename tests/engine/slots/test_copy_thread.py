"""The thread itself: pages that are taken back, failures, and its end."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from engine.ipc import messages as m
from engine.ipc.shared_memory import Arena, ArenaShape
from engine.ipc.slot_channel import SlotReceiver, SlotSender
from engine.kv_cache.kv_format import Codec, KVFormat, KVPiece
from engine.kv_cache.kv_frames import FrameCopy
from engine.kv_cache.kv_pool import KVPool, make_pool
from engine.kv_cache.page_lease import PageLease
from engine.slots.copy_thread import CopyThread
from engine.slots.devices import CpuCopies
from protocol.errors import EngineDied

KV = KVFormat(precision="exact", storage="wide", layers=4, kv_heads=8, head_dim=64, element_bytes=4)
BLOCKS = 2  # of a frame
FRAME_BYTES = KV.block_layer_bytes(Codec.RAW) * KV.layers * BLOCKS
SLOTS = 4
PAGES = 16
CPU = torch.device("cpu")


class ThreadWorld:
    """A thread between an arena and a pool, without a step loop. The test is loop and front."""

    def __init__(self, device: Callable[[KVPool], CpuCopies] | None = None) -> None:
        self.pool = make_pool(KV, PAGES, torch.float32, CPU)
        self.arena = Arena.create(ArenaShape(slot_bytes=FRAME_BYTES, inbound=SLOTS, outbound=SLOTS))
        ours, theirs = socket.socketpair()
        self.front = SlotSender(ours, lambda: None)
        copies = (device or cpu_copies)(self.pool)
        self.woken = threading.Event()
        self.events: list[m.Event] = []
        self._changed = threading.Condition()
        self.thread = CopyThread(
            KV, copies, self.arena, SlotReceiver(theirs), self._send, self.woken.set
        )
        self.thread.start()

    def _send(self, events: Sequence[m.Event]) -> None:
        with self._changed:
            self.events += events
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, 20), self.events[-5:]

    @property
    def freed(self) -> list[int]:
        return [s for e in self.events if isinstance(e, m.SlotsFree) for s in e.slots]

    @property
    def values(self) -> torch.Tensor:
        """[layers, pages, page_tokens, 2, kv_heads, head_dim]"""
        tensor: torch.Tensor = self.pool.tensor  # type: ignore[attr-defined]
        return tensor

    def ingest(self, handle: int, block: int, slot: int) -> None:
        piece = KVPiece(0, KV.layers, block, BLOCKS)
        self.front.send(m.Ingest(handle, block, slot, piece, FRAME_BYTES, Codec.RAW))

    def close(self) -> None:
        self.front.close()
        self.thread.close()
        self.arena.release_fd()


def cpu_copies(pool: KVPool) -> CpuCopies:
    return CpuCopies(pool, torch.zeros(1, FRAME_BYTES, dtype=torch.uint8))


@pytest.fixture
def world() -> Iterator[ThreadWorld]:
    made = ThreadWorld()
    yield made
    made.close()


def test_no_write_touches_pages_after_they_were_taken_back(world: ThreadWorld) -> None:
    """Each round gives pages to a sequence, lets frames come, and takes the pages back somewhere in
    the middle of a write. They belong to another sequence then."""
    draw = random.Random(1)
    frame = torch.full((FRAME_BYTES // 4,), 3.0)
    for slot in range(SLOTS):
        world.arena.slot(slot, FRAME_BYTES)[:] = frame.numpy().tobytes()
    interrupted = written = 0
    for handle in range(1, 120):
        lease = PageLease(handle, draw.sample(range(PAGES), 2 * SLOTS), 0)
        world.thread.expect(lease)
        before = len(world.freed)
        for slot in range(SLOTS):
            world.ingest(handle, BLOCKS * slot, slot)
        time.sleep(draw.random() * 3e-3)
        lease.revoke()
        world.values.fill_(7.0)
        done = lease.frames
        interrupted += 0 < done < SLOTS
        written += done
        world.wait(lambda before=before: len(world.freed) == before + SLOTS)  # type: ignore[misc]
        assert (world.values == 7.0).all(), f"a late write in round {handle}"
        assert lease.frames == done
    assert interrupted and written, "no round was interrupted between two frames"


def test_revocation_waits_for_one_frame_at_most() -> None:
    """The device writes when the test lets it."""
    gate, entered = threading.Semaphore(0), threading.Semaphore(0)

    class GatedCopies(CpuCopies):
        def scatter(self, frame: FrameCopy) -> None:
            entered.release()
            assert gate.acquire(timeout=20)
            super().scatter(frame)

    world = ThreadWorld(lambda pool: GatedCopies(pool, torch.zeros(1, FRAME_BYTES)))
    lease = PageLease(1, range(2 * SLOTS), 0)
    world.thread.expect(lease)
    for slot in range(SLOTS):
        world.ingest(1, BLOCKS * slot, slot)
    assert entered.acquire(timeout=20)
    revoking = threading.Thread(target=lease.revoke)
    revoking.start()
    revoking.join(0.05)
    assert revoking.is_alive(), "a frame is being written"
    gate.release()
    revoking.join(20)
    world.wait(lambda: len(world.freed) == SLOTS)
    assert lease.frames == 1 and not entered.acquire(blocking=False)
    world.close()


def test_unexpected_failure_reaches_the_step_loop() -> None:
    class BrokenCopies(CpuCopies):
        def scatter(self, frame: FrameCopy) -> None:
            raise ZeroDivisionError("a bug")

    world = ThreadWorld(lambda pool: BrokenCopies(pool, torch.zeros(1, FRAME_BYTES)))
    world.thread.expect(PageLease(1, range(2), 0))
    world.ingest(1, 0, 0)
    assert world.woken.wait(20), "a loop that waits is woken"
    with pytest.raises(EngineDied, match="copying KV failed: ZeroDivisionError: a bug"):
        world.thread.take_items()
    world.close()


def test_thread_ends_with_its_socket(world: ThreadWorld) -> None:
    world.front.close()
    world.thread._thread.join(20)
    assert not world.thread._thread.is_alive()
    assert world.thread.take_items() == []


def test_thread_ends_when_it_is_closed_while_it_waits(world: ThreadWorld) -> None:
    began = time.monotonic()
    world.thread.close()
    assert not world.thread._thread.is_alive() and time.monotonic() - began < 0.9


def test_device_is_bound_to_the_thread_before_it_copies() -> None:
    """Otherwise a copy for GPU 1 would be made by a thread that is on GPU 0."""
    calls: list[tuple[str, str]] = []

    class BoundCopies(CpuCopies):
        def bind_thread(self) -> None:
            calls.append(("bind", threading.current_thread().name))

        def scatter(self, frame: FrameCopy) -> None:
            calls.append(("copy", threading.current_thread().name))

    world = ThreadWorld(lambda pool: BoundCopies(pool, torch.zeros(1, FRAME_BYTES)))
    world.thread.expect(PageLease(1, range(2), 0))
    world.ingest(1, 0, 0)
    world.wait(lambda: world.freed == [0])
    assert calls == [("bind", "kv-copies"), ("copy", "kv-copies")]
    world.close()


def test_torch_keeps_its_threads_for_the_model() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        world = ThreadWorld()
        assert torch.get_num_threads() == 2
        own: list[int] = []
        world.thread._call(lambda: own.append(torch.get_num_threads()))
        world.thread.expect(PageLease(1, range(2), 0))
        world.ingest(1, 0, 0)
        world.wait(lambda: world.freed == [0])
        assert own == [1]
        world.close()
    finally:
        torch.set_num_threads(before)
