"""The copies of an engine on a GPU: streams, events, staging memory, and the pinned arena.

    slots or private memory --inbound stream--> staging --writing stream--> pool
    slots                   <-----------outbound stream---- staging <------ pool

No stream is that of the steps. The copy thread gathers a page when ``fence`` has shown the end of
the step that computed it, and scatters into a page after the end of every step that was launched
before the page was given to its sequence. It waits for a scatter within the lease of the pages, so
that steps launched later come after it. Kernels for copies take precedence over those of steps,
which last much longer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.ipc.shared_memory import Arena
from engine.kv_cache.kv_format import KVPiece
from engine.kv_cache.kv_frames import FrameCopy
from engine.kv_cache.kv_pool import KVPool
from engine.slots.devices import CopyCompletion, Fetch, HostFrame, arena_slots

log = logging.getLogger("baton.engine")

COPY_PRIORITY = -1
"""Of streams; those of steps have 0, and lower numbers come first."""

BATCH_FRAMES = 8
"""Frames of one call, so that two batches fit into the staging memory of a direction."""


class CudaCompletion:
    """The end of what the current stream has been given so far."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps
        self._event.record()  # on the current stream

    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CudaFetch(CudaCompletion):
    """A fetch on the current stream; ``found`` [frames] int32 is on the device."""

    def __init__(self, found: Tensor) -> None:
        self._defects = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        self._defects.copy_(found, non_blocking=True)
        super().__init__()

    def defects(self) -> Sequence[int]:
        found: list[int] = self._defects.tolist()
        return found


class CudaCopies:
    """The copies between one arena and one pool on a GPU. The arena is registered with CUDA until
    ``close``. Kernels are compiled here, before any step."""

    def __init__(self, pool: KVPool, arena: Arena, device: torch.device) -> None:
        from engine.kernels import kv_copy  # imports Triton, which belongs to the GPU build

        shape = arena.shape
        self._kernels = kv_copy
        self._pool = pool
        self._device = device
        self.inbound_slots = shape.inbound_staging_slots
        self.outbound_slots = shape.outbound_staging_slots
        self.batch = min(BATCH_FRAMES, max(1, min(self.inbound_slots, self.outbound_slots) // 2))
        self._fetched, self._gathered = (
            torch.empty(count, shape.staging_slot_bytes, dtype=torch.uint8, device=device)
            for count in (self.inbound_slots, self.outbound_slots)
        )
        self._private = torch.empty(
            self.inbound_slots, shape.slot_bytes, dtype=torch.uint8, pin_memory=True
        )
        self._inbound, self._writing, self._outbound = (
            torch.cuda.Stream(device, priority=COPY_PRIORITY) for _ in range(3)
        )
        self._arena = torch.frombuffer(arena.map, dtype=torch.uint8)
        self._registered = _register(self._arena, device)
        self._warm_up(arena)

    def bind_thread(self) -> None:
        """A new thread is on GPU 0. It would return to it after every copy, and each return would
        make a context there, in the memory of another engine."""
        torch.cuda.set_device(self._device)

    def fence(self) -> CopyCompletion:
        return CudaCompletion()

    def fetch(self, frames: Sequence[HostFrame]) -> Fetch:
        with torch.cuda.stream(self._inbound):
            for data, copy in frames:
                self._fetched[copy.slot][: len(data)].copy_(data, non_blocking=True)
            # The check reads staging memory alone, whatever the pages will be.
            copies = [copy._replace(pages=[0] * copy.piece.blocks) for _, copy in frames]
            return CudaFetch(self._kernels.find_defects(self._pool, self._fetched, copies))

    def scatter(self, frame: FrameCopy) -> None:
        # The thread has seen the end of its fetch, so no stream has to wait for another one.
        with torch.cuda.stream(self._writing):
            self._kernels.scatter_frames(self._pool, self._fetched, [frame])
            done = CudaCompletion()
        done.wait()

    def gather(self, frames: Sequence[HostFrame]) -> CopyCompletion:
        with torch.cuda.stream(self._outbound):
            copies = [frame.copy for frame in frames]
            self._kernels.gather_frames(self._pool, self._gathered, copies)
            for data, copy in frames:
                data.copy_(self._gathered[copy.slot][: len(data)], non_blocking=True)
            return CudaCompletion()

    def private_slots(self) -> Tensor:
        return self._private

    def close(self) -> None:
        # After an error CUDA repeats it in every call; the first one has been raised elsewhere.
        with contextlib.suppress(RuntimeError):
            for stream in (self._inbound, self._writing, self._outbound):
                stream.synchronize()
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._arena.data_ptr())
            self._registered = False

    def _warm_up(self, arena: Arena) -> None:
        """Compile every kernel, and let torch allocate what it keeps for each stream: a layer of
        page 0 goes to a slot of the arena and comes back."""
        torch.cuda.synchronize()  # the pool is zeroed on another stream
        slot, piece = arena_slots(arena)[arena.shape.inbound], KVPiece(0, 1, 0, 1)
        for codec in self._pool.format.codecs:
            frame = FrameCopy(0, piece, [0], codec)
            data = slot[: self._pool.format.piece_bytes(piece, codec)]
            self.gather([HostFrame(data, frame)]).wait()
            fetch = self.fetch([HostFrame(data, frame)])
            fetch.wait()
            assert list(fetch.defects()) == [0]
            self.scatter(frame)


def _register(arena: Tensor, device: torch.device) -> bool:
    """Pin the arena's memory, so that copies run beside the host. Return whether CUDA could; some
    sandboxes refuse it, and then copies are correct but wait for each other."""
    nbytes = arena.numel() * arena.element_size()
    code = int(torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), nbytes, 0))
    if code:
        with _absorbed_error():
            torch.ones(1, device=device)
        log.warning(
            "cudaHostRegister of %d MiB for KV frames failed with error %d: KV will be copied in"
            " and out slowly. Allow the process to lock memory (ulimit -l, or the container's).",
            nbytes >> 20,
            code,
        )
    return not code


@contextlib.contextmanager
def _absorbed_error() -> Iterator[None]:
    """Clear CUDA's last error: the launch in this block reports it, instead of a later one."""
    with contextlib.suppress(RuntimeError):
        yield
