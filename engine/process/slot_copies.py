"""KV frames between slots of the arena and a pool on a GPU, beside the steps and without a wait.

    Ingest --> queued --staging slot--> fetching --passed--> scattering --> staging slot free
                 |                         |   `--defect--> ReceiveFailed
                 |                         `--copied--> SlotsFree
                 `--sequence gone--> SlotsFree

    fill_slot, offer --> gathering, sending --copied--> KVFrame

A copy over PCIe takes 20 us for each MiB, so it runs on a stream of its own, between the arena and
staging memory on the GPU. What touches the pool runs on the stream of the steps:

- A page may be freed and given to another sequence while a launched step still reads it. In the
  order of one stream, the scatter into the page comes after that step.
- A frame is gathered after the kernels that computed it, by the same order.

A frame is checked where it was copied to, before it may touch a page. ``Join`` and ``EndImport``
are held until every frame of their sequence has been checked and its scatter launched: later steps
see the KV then. Events of copies are sent by a thread, because the loop is busy for whole steps.

``EngineServer`` owns one ``SlotCopies``: ``StreamedCopies`` here on a GPU, else ``DirectCopies``.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from engine.execution.engine import Engine
from engine.ipc import messages as m
from engine.ipc.channel import ChannelClosed
from engine.kv_cache.kv_format import Codec, KVPiece
from engine.kv_cache.kv_pool import FrameCopy, FrameDefect, frame_refusal


class CopyProgress(NamedTuple):
    """What has become known of copies since the last look."""

    events: list[m.Event]
    released: list[m.Command]  # held commands that may be applied now, in order


class SlotCopies(Protocol):
    """Copies KV between slots of the arena and the pool for one engine server."""

    @property
    def asynchronous(self) -> bool:
        """Whether events of copies overtake events that the server has not sent yet."""

    @property
    def busy(self) -> bool:
        """Whether ``poll`` has to be called soon, although the engine has nothing to compute."""

    def ingest(self, command: m.Ingest) -> Sequence[m.Event]:
        """Write a frame to the pages of its sequence, which exists. Return the events so far."""

    def hold(self, command: m.Command) -> bool:
        """Return whether the command has to wait for frames; it is held here then."""

    def poll(self) -> CopyProgress:
        """Continue with what is complete. Called in every loop while ``busy``, after commands."""

    def fill_slot(self, handle: int, piece: KVPiece, slot: int, codec: Codec) -> int:
        """Copy computed KV into a slot, at the latest with ``offer``. Return the bytes."""

    def offer(self, frames: list[m.KVFrame]) -> Sequence[m.Event]:
        """Send the frames filled since the last call, now or when they are copied. Return the
        events to send now."""

    def close(self) -> None:
        """Finish what is being copied, and release memory and threads."""


class CopyCompletion(Protocol):
    """The end of work on a GPU stream."""

    def is_done(self) -> bool:
        """Return whether the work is complete."""

    def wait(self) -> None:
        """Block the calling thread, not the interpreter, until the work is complete."""


class Fetch(CopyCompletion, Protocol):
    """Frames on their way from arena slots to staging memory."""

    def defects(self) -> Sequence[int]:
        """Return the ``FrameDefect`` of each frame. The work must be complete."""


class ArenaFrame(NamedTuple):
    """A frame in slot ``arena_slot`` of the arena, and its slot of staging memory."""

    arena_slot: int
    nbytes: int
    copy: FrameCopy


class CopyDevice(Protocol):
    """Starts copies on a GPU and waits for none. It has as many staging slots for outgoing frames
    as the arena has outbound slots."""

    inbound_slots: int  # of staging memory

    def fetch(self, frames: Sequence[ArenaFrame]) -> Fetch:
        """Copy frames to staging memory and check them there, on a stream of its own. No pages are
        needed yet."""

    def scatter(self, frames: Sequence[FrameCopy]) -> CopyCompletion:
        """Copy fetched frames to their pages, on the stream of the steps."""

    def gather(self, frames: Sequence[ArenaFrame]) -> CopyCompletion:
        """Copy pages to staging memory on the stream of the steps, and from there to slots of the
        arena on a stream of its own, whose end is returned."""

    def close(self) -> None:
        """Wait for all copies and unregister the arena."""


class CompletionSender(Protocol):
    """Sends events once some work is complete, in the order of the calls."""

    def send_after(self, done: CopyCompletion, events: Sequence[m.Event]) -> None: ...

    def close(self) -> None: ...


class SenderThread:
    """Waits for one stream's work and sends the events of each piece of it, also while the loop
    waits for a step. The server creates one for each copy stream."""

    def __init__(self, send: Callable[[Sequence[m.Event]], None], name: str) -> None:
        self._send = send
        self._queue: queue.SimpleQueue[tuple[CopyCompletion, Sequence[m.Event]] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send_after(self, done: CopyCompletion, events: Sequence[m.Event]) -> None:
        self._queue.put((done, events))

    def close(self) -> None:
        """Send what is queued, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            done, events = entry
            done.wait()
            try:
                self._send(events)
            except ChannelClosed:
                return  # the loop notices it, too


class _Fetching(NamedTuple):
    fetch: Fetch
    commands: list[m.Ingest]
    staging: list[int]


class StreamedCopies:
    """The copies of an engine on a GPU. ``make_copies`` creates it, and the server closes it."""

    asynchronous = True

    def __init__(
        self,
        engine: Engine,
        device: CopyDevice,
        inbound: CompletionSender,
        outbound: CompletionSender,
    ) -> None:
        self._engine = engine
        self._device = device
        self._inbound, self._outbound = inbound, outbound
        self._free = list(range(device.inbound_slots))  # of staging memory
        self._queued: deque[m.Ingest] = deque()
        self._fetching: deque[_Fetching] = deque()
        self._scattering: deque[tuple[CopyCompletion, list[int]]] = deque()
        self._unwritten: Counter[int] = Counter()  # frames by handle, until scattered or dropped
        self._held: dict[int, m.Command] = {}  # by handle
        self._filled: list[ArenaFrame] = []

    @property
    def busy(self) -> bool:
        return bool(self._queued or self._fetching or self._scattering)

    # ---- into the pool ----------------------------------------------------------------------

    def ingest(self, command: m.Ingest) -> Sequence[m.Event]:
        self._queued.append(command)
        self._unwritten[command.handle] += 1
        return ()

    def hold(self, command: m.Command) -> bool:
        if isinstance(command, m.Drop):
            self._held.pop(command.handle, None)
        elif isinstance(command, m.Join | m.EndImport) and self._unwritten[command.handle]:
            self._held[command.handle] = command
            return True
        return False

    def poll(self) -> CopyProgress:
        progress = CopyProgress([], [])
        self._finish_scatters()
        self._finish_fetches(progress)
        self._start_fetch(progress)
        return progress

    def _finish_scatters(self) -> None:
        while self._scattering and self._scattering[0][0].is_done():
            self._free += self._scattering.popleft()[1]

    def _finish_fetches(self, progress: CopyProgress) -> None:
        """Scatter what has passed the check, and drop the sequences of what has not. Fetches
        complete in the order of their stream, so later ones wait for the first."""
        passed: list[FrameCopy] = []
        while self._fetching and self._fetching[0].fetch.is_done():
            fetch, commands, staging = self._fetching.popleft()
            for command, slot, defects in zip(commands, staging, fetch.defects(), strict=True):
                if frame := self._judge(command, slot, FrameDefect(defects), progress):
                    passed.append(frame)
                else:
                    self._free.append(slot)
                self._count_written(command.handle, progress)
        if passed:
            self._scattering.append((self._device.scatter(passed), [f.slot for f in passed]))

    def _judge(
        self, command: m.Ingest, slot: int, defects: FrameDefect, progress: CopyProgress
    ) -> FrameCopy | None:
        """Return a fetched frame with its pages if it is to be written. If it is the first invalid
        one of its sequence, drop the sequence."""
        handle, piece = command.handle, command.piece
        if handle not in self._engine.scheduler.sequences:
            return None  # dropped meanwhile, perhaps for an earlier frame
        if defects:
            self._engine.reject_write(handle)
            progress.events.append(m.ReceiveFailed(handle, str(frame_refusal(defects))))
            return None
        pages = self._engine.pages_to_write(handle, piece)
        self._engine.confirm_write(handle, piece)  # the scatter precedes every later step
        return FrameCopy(slot, piece, pages, command.codec)

    def _count_written(self, handle: int, progress: CopyProgress) -> None:
        self._unwritten[handle] -= 1
        if not self._unwritten[handle]:
            del self._unwritten[handle]
            if (command := self._held.pop(handle, None)) is not None:
                progress.released.append(command)

    def _start_fetch(self, progress: CopyProgress) -> None:
        """Fetch as many queued frames as there is staging memory for."""
        commands: list[m.Ingest] = []
        while self._queued and len(commands) < len(self._free):
            command = self._queued.popleft()
            if command.handle in self._engine.scheduler.sequences:
                commands.append(command)
            else:
                progress.events.append(m.SlotsFree([command.slot]))
                self._count_written(command.handle, progress)
        if not commands:
            return
        staging = [self._free.pop() for _ in commands]
        frames = [
            ArenaFrame(c.slot, c.nbytes, FrameCopy(slot, c.piece, (), c.codec))
            for c, slot in zip(commands, staging, strict=True)
        ]
        fetch = self._device.fetch(frames)
        self._fetching.append(_Fetching(fetch, commands, staging))
        # The last read of these slots is complete with the fetch, whatever its frames are.
        self._inbound.send_after(fetch, [m.SlotsFree([c.slot for c in commands])])

    # ---- out of the pool --------------------------------------------------------------------

    def fill_slot(self, handle: int, piece: KVPiece, slot: int, codec: Codec) -> int:
        nbytes = piece.bytes(self._engine.format.page_layer_bytes(codec))
        copy = FrameCopy(slot, piece, self._engine.pages_of(handle, piece), codec)
        self._filled.append(ArenaFrame(slot, nbytes, copy))
        return nbytes

    def offer(self, frames: list[m.KVFrame]) -> Sequence[m.Event]:
        filled, self._filled = self._filled, []
        assert [f.slot for f in frames] == [f.arena_slot for f in filled]
        if filled:
            self._outbound.send_after(self._device.gather(filled), frames)
        return ()

    def close(self) -> None:
        self._inbound.close()
        self._outbound.close()
        self._device.close()
