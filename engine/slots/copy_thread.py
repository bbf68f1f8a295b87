"""The thread of an engine process that copies KV frames between slots and the pool.

    front --slot commands--> [ copy thread ] <--offer, publish, expect, wait, end--- step loop
    front <----events-------- [            ] ---commands whose frames are written--> step loop

It works beside the steps: no frame waits for a step to end, and no step waits for a frame, except
that a sequence's pages can be taken back only after the one frame that is being written into them
(``engine.kv_cache.page_lease``). All state belongs to the thread; the step loop's calls are queued.

An event is sent by the thread itself. The step loop calls ``publish`` and ``expect`` after it has
queued the event that opens the sequence, and the front learns of it before any frame.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.ipc import messages as m
from engine.ipc.channel import ChannelClosed
from engine.ipc.pair_messages import PairCommand
from engine.ipc.shared_memory import Arena
from engine.ipc.slot_channel import SlotReceiver
from engine.kv_cache.kv_format import Codec, KVFormat, KVPiece
from engine.kv_cache.page_lease import PageLease
from engine.slots.devices import CopyDevice, arena_slots
from engine.slots.incoming import IncomingFrames, LoopItem, Waiting
from engine.slots.outgoing import ComputedBlocks, OutgoingFrames
from protocol.errors import EngineDied

FENCE_POLL_S = 0.001
"""Interval at which the thread asks a GPU whether a launched step has ended."""

IDLE_WAIT_S = 1.0
"""The longest wait for a command or a call. Both end it; this is against a lost wake-up."""

CLOSE_S = 5.0
"""How long ``close`` waits for the copy in progress."""


class CopyThread:
    """The copy thread of one engine process. ``EngineServer`` creates, starts and closes it.

    ``send`` sends events to the front and is called by the thread; ``wake`` ends a wait of the step
    loop, which then calls ``take_items``. Commands about pairs go to ``submit_pair``.
    """

    def __init__(
        self,
        kv: KVFormat,
        device: CopyDevice,
        arena: Arena,
        channel: SlotReceiver,
        send: Callable[[Sequence[m.Event]], None],
        wake: Callable[[], None],
        submit_pair: Callable[[PairCommand], None] = lambda command: None,
    ) -> None:
        self._device = device
        self._channel = channel
        self._send = send
        self._wake = wake
        self._submit_pair = submit_pair
        slots = arena_slots(arena)
        self._events: list[m.Event] = []
        self._given: list[LoopItem] = []
        self._outgoing = OutgoingFrames(
            kv, device, arena, slots, self._events.append, self._apply_calls
        )
        self._incoming = IncomingFrames(kv, device, slots, self._events.append, self._given.append)
        self._calls: deque[Callable[[], None]] = deque()  # of the step loop
        self._items: deque[LoopItem] = deque()  # for the step loop
        self._failure: BaseException | None = None
        self._closing = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)

    # ---- called by the step loop ------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. The number of torch's threads stays what it is for the caller."""
        threads = torch.get_num_threads()
        self._thread.start()
        self._ready.wait()
        torch.set_num_threads(threads)

    def offer(self, handle: int, split: Callable[[int], Sequence[KVPiece]], codec: Codec) -> None:
        """Send the pieces of a prefill or an export that ``split`` returns for the first block to
        send, once they are published and granted."""
        self._call(partial(self._outgoing.queue.offer, handle, split, codec))

    def publish(self, computed: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """Let blocks be sent that the steps so far compute: of each (handle, pages, blocks) the
        leading ``blocks``, which stay in these pages until ``end_offer``."""
        fence = self._device.fence()
        for handle, pages, blocks in computed:
            entry = ComputedBlocks(handle, list(pages), blocks, fence)
            self._call(partial(self._outgoing.publish, entry))

    def end_offer(self, handle: int) -> None:
        """Send nothing more of an offer, or of one that was refused. It is called before the pages
        can be used again: a frame that is being copied then is not sent."""
        self._call(partial(self._outgoing.queue.end_by_loop, handle))

    def expect(self, lease: PageLease) -> None:
        """Write frames into the pages of ``lease`` after the steps so far, until it is revoked."""
        self._call(partial(self._incoming.expect, lease, self._device.fence()))

    def wait_for_frames(self, command: Waiting) -> None:
        """Return ``command`` by ``take_items`` when its frames are written."""
        self._call(partial(self._incoming.wait, command))

    def take_items(self) -> list[LoopItem]:
        """Return, once, what is to be applied now. Raise EngineDied if the thread has failed."""
        if self._failure is not None:
            kind = type(self._failure).__name__
            raise EngineDied(f"copying KV failed: {kind}: {self._failure}") from self._failure
        return [self._items.popleft() for _ in range(len(self._items))]

    def close(self) -> None:
        """End the thread, and release memory. Idempotent."""
        self._closing = True
        self._channel.wake()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._incoming.peers.close()
            self._device.close()
            self._channel.close()

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._channel.wake()

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        torch.get_num_threads()  # makes the next call concern this thread alone
        torch.set_num_threads(1)  # its copies would otherwise start threads beside the model's
        self._ready.set()
        try:
            self._device.bind_thread()
            busy = False
            while not self._closing:
                busy = self._advance(busy)
        except ChannelClosed:
            pass  # the step loop notices it, too
        except BaseException as error:
            self._failure = error
            self._wake()

    def _advance(self, busy: bool) -> bool:
        """Apply what has arrived, and copy one batch in each direction. Return whether there may be
        more to do at once; else wait first."""
        commands = self._channel.receive(0.0 if busy else self._wait_s())
        # A command about a sequence was sent after the step loop's call that opened it.
        self._apply_calls()
        for command in commands:
            self._apply(command)
        self._flush()
        busy = self._outgoing.advance()
        self._flush()
        busy |= self._incoming.advance()
        self._flush()
        if not busy and (copy := self._outgoing.running() or self._incoming.running()):
            copy.wait()
            return True
        return busy

    def _wait_s(self) -> float:
        waiting = self._outgoing.awaits_steps or self._incoming.queued
        return FENCE_POLL_S if waiting else IDLE_WAIT_S

    @property
    def outbound_slots_held(self) -> int:
        """Outbound slots that hold a frame, which is on its way or waits to be read."""
        return self._outgoing.queue.held

    def _apply_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _apply(self, command: m.SlotCommand) -> None:
        if isinstance(command, m.Ingest):
            self._incoming.ingest(command)
        elif isinstance(command, m.Skip):
            self._outgoing.queue.skip(command.handle, command.blocks)
        elif isinstance(command, m.Grant):
            self._outgoing.queue.grant(command.handle, command.frames)
        elif isinstance(command, m.SlotsFree):
            self._outgoing.queue.free(command.slots)
        elif isinstance(command, m.EndOffer):
            self._outgoing.queue.end_by_front(command.handle)
        elif isinstance(command, m.MapArena):
            self._incoming.peers.map(command, self._channel.take_descriptor)
        elif isinstance(command, m.UnmapArena):
            self._incoming.peers.unmap(command.arena)
        else:
            self._submit_pair(command)

    def _flush(self) -> None:
        """Send the events so far, and then wake the step loop for what it has to apply."""
        if self._events:
            self._send(list(self._events))
            self._events.clear()
        if self._given:
            self._items += self._given
            self._given.clear()
            self._wake()
