"""An engine process without a model: a pool, slots and the real copy thread.

``EngineClient`` starts it as it starts an engine, with the name of a ``KVShape`` as the model. A
prompt is computed at once, or in paced steps, as the id of its request says; its KV is what the
pool holds. Sequences use the same pages, so one transfer runs at a time.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from bench.kv_link.product.shapes import SHAPES, KVShape
from cluster.worker import engine_main
from engine.collectives.engine_pairs import EnginePairs
from engine.ipc import messages as m
from engine.ipc.channel import ChannelClosed, EngineChannel
from engine.ipc.settings import EngineSettings
from engine.ipc.shared_memory import Arena
from engine.ipc.slot_channel import SlotReceiver
from engine.kv_cache import fp8_grid
from engine.kv_cache.kv_format import split_into_pieces
from engine.kv_cache.kv_frames import FrameCopy
from engine.kv_cache.kv_pool import WidePool
from engine.kv_cache.page_lease import PageLease
from engine.slots.copy_thread import CopyThread
from engine.slots.devices import DONE, CopyCompletion, CpuCopies, HostFrame, arena_slots
from engine.slots.incoming import RejectedSequence
from protocol.block_keys import BLOCK_TOKENS
from protocol.requests import Finish, Request

PAYLOAD: Final = "payload"
"""Request id: frames hold what lies in the slots, and no page is read or written."""

POOLS: Final = "pools"
"""Request id: frames are read from the pool of the sender and written to that of the receiver."""

CHECK: Final = "check"
"""Request id: as POOLS, and the first token at each end is a digest of the KV in its pool."""

PACED: Final = "paced"
"""Request id: as PAYLOAD, but the prompt is computed in steps."""

STEP_S = 0.025
STEP_BLOCKS = 16
"""A paced step: 512 tokens, as a prefill of an 8B model takes on one GPU."""


class SwitchedCopies(CpuCopies):
    """Copies between slots and pool that can be left out."""

    def __init__(self, pool: WidePool, private: Tensor) -> None:
        super().__init__(pool, private)
        self.copies_pages = True

    def gather(self, frames: Sequence[HostFrame]) -> CopyCompletion:
        return super().gather(frames) if self.copies_pages else DONE

    def scatter(self, frame: FrameCopy) -> None:
        if self.copies_pages:
            super().scatter(frame)


class PoolEngine:
    """Answers the commands of one front as an engine does."""

    def __init__(
        self,
        shape: KVShape,
        channel: EngineChannel[m.Command],
        arena: Arena,
        slot_channel: SlotReceiver,
        *,
        sending: bool,
    ) -> None:
        self._shape = shape
        self._channel = channel
        device = torch.device("cpu")
        self._pool = WidePool(shape.kv_format, shape.pages, shape.torch_dtype, device)
        if sending:
            fill(self._pool.tensor)
            for slot in arena.shape.outbound_slots():
                arena_slots(arena)[slot].random_(0, 255)
        private = torch.zeros(1, arena.shape.slot_bytes, dtype=torch.uint8)
        self._device = SwitchedCopies(self._pool, private)
        self._pairs = EnginePairs(arena_slots(arena), channel.send)
        self._copies = CopyThread(
            *(shape.kv_format, self._device, arena, slot_channel),
            *(channel.send, channel.wake, self._pairs.submit),
        )
        self._requests: dict[int, Request] = {}  # by handle
        self._leases: dict[int, PageLease] = {}
        self._offers: set[int] = set()
        self._steps: deque[tuple[float, int, int]] = deque()  # (end, handle, computed blocks)

    def run(self) -> None:
        """Run until the front has closed the channel."""
        self._copies.start()
        try:
            while True:
                commands = self._channel.receive(self._wait_s())
                for command in commands:
                    self._apply(command)
                for item in self._copies.take_items():
                    if not isinstance(item, RejectedSequence):  # the front has been told
                        self._apply(item)
                self._end_steps()
                if not commands:
                    self._channel.send([m.EngineBeat(0, 0, 0, self._shape.pages)])
        except ChannelClosed:
            pass
        finally:
            self._copies.close()
            self._pairs.close()

    def _wait_s(self) -> float:
        if not self._steps:
            return m.BEAT_S
        return min(m.BEAT_S, max(0.0, self._steps[0][0] - time.monotonic()))

    def _apply(self, command: m.Command) -> None:
        if isinstance(command, m.Prefill):
            self._prefill(command)
        elif isinstance(command, m.Receive):
            self._receive(command)
        elif isinstance(command, m.Reserve):
            self._reserve(command.handle)
        elif isinstance(command, m.Join):
            self._join(command)
        elif isinstance(command, m.Drop):
            self._drop(command.handle)

    def _pages(self, blocks: int) -> list[int]:
        return [block % self._shape.pages for block in range(blocks)]

    # ---- the sender -------------------------------------------------------------------------

    def _prefill(self, command: m.Prefill) -> None:
        kv, handle, request = self._shape.kv_format, command.handle, command.request
        blocks = len(request.prompt) // BLOCK_TOKENS
        self._device.copies_pages = request.id in (POOLS, CHECK)
        self._offers.add(handle)
        self._requests[handle] = request
        size = kv.block_layer_bytes(command.codec)
        pieces = split_into_pieces(0, blocks, kv.layers, size, command.frame_bytes)
        self._channel.send([m.Started(handle, 0)])
        self._copies.offer(handle, lambda _: pieces, command.codec)
        if request.id == PACED:
            ends = range(STEP_BLOCKS, blocks + STEP_BLOCKS, STEP_BLOCKS)
            began = time.monotonic()
            self._steps += [
                (began + STEP_S * (number + 1), handle, min(blocks, end))
                for number, end in enumerate(ends)
            ]
        else:
            self._computed(handle, blocks)

    def _end_steps(self) -> None:
        while self._steps and self._steps[0][0] <= time.monotonic():
            _, handle, blocks = self._steps.popleft()
            if handle in self._offers:
                self._computed(handle, blocks)

    def _computed(self, handle: int, blocks: int) -> None:
        """Report the end of a step, and let its blocks be sent."""
        if blocks < len(self._requests[handle].prompt) // BLOCK_TOKENS:
            self._channel.send([m.Computed(handle, blocks * BLOCK_TOKENS)])
        else:
            self._draw(handle)
        self._copies.publish([(handle, self._pages(blocks), blocks)])

    def _draw(self, handle: int) -> None:
        request = self._requests[handle]
        token = 0
        if request.id == CHECK:
            token = digest(self._pool.tensor[:, : len(request.prompt) // BLOCK_TOKENS])
        self._channel.send([m.TokensDrawn([handle], [token], [Finish.NONE])])

    # ---- the receiver -----------------------------------------------------------------------

    def _receive(self, command: m.Receive) -> None:
        self._requests[command.handle] = command.request
        self._device.copies_pages = command.request.id in (POOLS, CHECK)
        if command.request.id == CHECK:
            self._pool.tensor.zero_()
        self._channel.send([m.PrefixFound(command.handle, 0)])

    def _reserve(self, handle: int) -> None:
        blocks = len(self._requests[handle].prompt) // BLOCK_TOKENS
        lease = self._leases[handle] = PageLease(handle, self._pages(blocks), 0)
        self._copies.expect(lease)
        self._channel.send([m.Reserved(handle)])

    def _join(self, command: m.Join) -> None:
        lease = self._leases.get(command.handle)
        if lease is None:
            return
        if lease.frames < command.frames:
            self._copies.wait_for_frames(command)
            return
        self._channel.send([m.Joined(command.handle)])
        self._draw(command.handle)

    def _drop(self, handle: int) -> None:
        self._requests.pop(handle, None)
        if (lease := self._leases.pop(handle, None)) is not None:
            lease.revoke()
        if handle in self._offers:
            self._offers.remove(handle)
            self._copies.end_offer(handle)


def fill(tensor: Tensor) -> None:
    """Fill a wide pool [layers, pages, page_tokens, 2, kv_heads, head_dim] with values on the fp8
    grid, different on each page."""
    page = torch.randn(tensor[:, 0].shape, generator=torch.Generator().manual_seed(1))
    fp8_grid.round_to_grid_(page.flatten(0, -3))
    page = page.to(tensor.dtype)
    for number in range(tensor.shape[1]):
        tensor[:, number] = page.roll(number, dims=-1)  # scales stay, so values stay on the grid


def digest(tensor: Tensor) -> int:
    """Return 31 bits of a checksum of the bytes of a tensor [layers, ...]."""
    crc = 0
    for layer in tensor:
        crc = zlib.crc32(layer.contiguous().view(torch.uint8).numpy(), crc)
    return crc & 0x7FFFFFFF


def ready_of(name: str) -> m.EngineReady:
    """Return what an engine with the shape ``name`` says of itself."""
    shape = SHAPES[name]
    return m.EngineReady(
        fingerprint=name,
        vocab_size=1 << 31,
        max_model_len=1 << 20,
        kv=shape.kv_format,
        kv_tokens=shape.pages * BLOCK_TOKENS,
        step_seconds=STEP_S,
        prefill_chunk=STEP_BLOCKS * BLOCK_TOKENS,
    )


def build(
    settings: EngineSettings,
    channel: EngineChannel[m.Command],
    arena: Arena,
    slot_channel: SlotReceiver,
    progress: Callable[[str, float], None],
) -> Callable[[], None]:
    """Do what ``engine_main.build_server`` does."""
    torch.set_num_threads(1)
    shape = SHAPES[settings.model_path]
    engine = PoolEngine(*(shape, channel, arena, slot_channel), sending=settings.role == "prefill")
    channel.send([ready_of(settings.model_path)])
    return engine.run


def main() -> None:
    engine_main.build_server = build
    engine_main.main()


if __name__ == "__main__":
    main()
