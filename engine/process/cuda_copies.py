"""The CUDA side of ``StreamedCopies``: streams, events, staging memory, and the pinned arena.

    arena --H2D stream--> staging [inbound_staging_slots] --steps' stream--> pool
    arena <--D2H stream-- staging [outbound]              <--steps' stream-- pool

An outgoing frame uses the staging slot that belongs to its slot of the arena: the front frees that
one after the copy into it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.ipc.shared_memory import ArenaShape
from engine.kv_cache.kv_format import KVPiece
from engine.kv_cache.kv_pool import FrameCopy, KVPool
from engine.process.slot_copies import ArenaFrame, CopyCompletion, Fetch

log = logging.getLogger("baton.engine")


class CudaCompletion:
    """The end of what a stream has been given so far."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps
        self._event.record()  # on the current stream

    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def delay(self, stream: torch.cuda.Stream) -> None:
        """Let later work of ``stream`` begin after this end. The host does not wait."""
        stream.wait_event(self._event)


class CudaFetch(CudaCompletion):
    """A fetch on the current stream; ``found`` [frames] int32 is on the device."""

    def __init__(self, found: Tensor) -> None:
        self._defects = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        self._defects.copy_(found, non_blocking=True)
        super().__init__()

    def defects(self) -> Sequence[int]:
        found: list[int] = self._defects.tolist()
        return found


class CudaCopyDevice:
    """The copies between one arena and one pool on a GPU. ``slots`` [slots, slot_bytes] uint8 is
    the arena, registered with CUDA until ``close``. Kernels are compiled here, before any step."""

    def __init__(
        self, pool: KVPool, slots: Tensor, arena: ArenaShape, device: torch.device
    ) -> None:
        from engine.kernels import kv_copy  # imports Triton, which belongs to the GPU build

        self._kernels = kv_copy
        self._pool = pool
        self._slots = slots
        self._first_outbound = arena.inbound
        self.inbound_slots = arena.inbound_staging_slots
        self._fetched, self._gathered = (
            torch.empty(count, arena.staging_slot_bytes, dtype=torch.uint8, device=device)
            for count in (self.inbound_slots, arena.outbound)
        )
        # Views made once: the host spends its time between two steps here.
        self._slot_rows = slots.unbind()
        self._fetched_rows, self._gathered_rows = self._fetched.unbind(), self._gathered.unbind()
        self._h2d, self._d2h = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._registered = _register(slots, device)
        self._warm_up()

    def fetch(self, frames: Sequence[ArenaFrame]) -> Fetch:
        with torch.cuda.stream(self._h2d):
            for slot, nbytes, copy in frames:
                target = self._fetched_rows[copy.slot][:nbytes]
                target.copy_(self._slot_rows[slot][:nbytes], non_blocking=True)
            copies = [frame.copy for frame in frames]
            return CudaFetch(self._kernels.find_defects(self._pool, self._fetched, copies))

    def scatter(self, frames: Sequence[FrameCopy]) -> CopyCompletion:
        # The host has seen the end of their fetch, so no stream has to wait for another one.
        self._kernels.scatter_frames(self._pool, self._fetched, frames)
        return CudaCompletion()

    def gather(self, frames: Sequence[ArenaFrame]) -> CopyCompletion:
        first = self._first_outbound
        copies = [copy._replace(slot=slot - first) for slot, _, copy in frames]
        # After the kernels that computed these pages, because they are on the same stream.
        self._kernels.gather_frames(self._pool, self._gathered, copies)
        CudaCompletion().delay(self._d2h)
        with torch.cuda.stream(self._d2h):
            for slot, nbytes, _ in frames:
                source = self._gathered_rows[slot - first][:nbytes]
                self._slot_rows[slot][:nbytes].copy_(source, non_blocking=True)
            return CudaCompletion()

    def close(self) -> None:
        torch.cuda.synchronize()
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._slots.data_ptr())

    def _warm_up(self) -> None:
        """Compile every kernel, and let torch allocate what it keeps for each stream: a layer of
        page 0 goes to a slot of the arena and comes back."""
        slot, piece = self._first_outbound, KVPiece(0, 1, 0, 1)
        for codec in self._pool.format.codecs:
            nbytes = piece.bytes(self._pool.format.page_layer_bytes(codec))
            self.gather([ArenaFrame(slot, nbytes, FrameCopy(slot, piece, [0], codec))]).wait()
            frame = FrameCopy(0, piece, [0], codec)
            fetch = self.fetch([ArenaFrame(slot, nbytes, frame)])
            fetch.wait()
            assert list(fetch.defects()) == [0]
            self.scatter([frame]).wait()


def _register(slots: Tensor, device: torch.device) -> bool:
    """Pin the arena's memory, so that copies run beside the host. Return whether CUDA could; some
    sandboxes refuse it, and then copies are correct but wait for each other."""
    nbytes = slots.numel() * slots.element_size()
    code = int(torch.cuda.cudart().cudaHostRegister(slots.data_ptr(), nbytes, 0))
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
