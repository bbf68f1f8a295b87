"""One engine process as its front sees it: sockets, arena, and the listener of each handle.

A session ends for good when the process dies, or when the front kills it because it has stopped
answering. All its sequences are lost then, and every listener is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from engine.ipc import messages as m
from engine.ipc.channel import BatchDecoder, encode_batch
from engine.ipc.pair_messages import PairEvent
from engine.ipc.settings import EngineSettings
from engine.ipc.shared_memory import Arena
from engine.ipc.slot_channel import SlotSender
from engine.process.untaken_prompts import UntakenPrompts
from protocol.block_keys import BLOCK_TOKENS, KEY_BYTES
from protocol.errors import EngineDied, StartupError
from protocol.liveness import SilenceDetector
from protocol.requests import Finish, Logprobs, request_digest

log = logging.getLogger("baton.engine")

ProgressReport = Callable[[str, float], None]
"""Called with (what is being done, fraction done)."""

_EXIT_POLLS = 25


def exit_text(status: int) -> str:
    """Return a clause about the exit status of a process, negative for a signal."""
    if status >= 0:
        return f": it exited with status {status}"
    memory = " (SIGKILL): often out of memory" if -status == signal.SIGKILL else ""
    return f": killed by signal {-status}{memory}"


class CacheListener(Protocol):
    """Is told about every change of the engine's prefix cache."""

    def stored(self, keys: list[bytes]) -> None:
        """Blocks were stored, parents before children."""

    def evicted(self, keys: list[bytes]) -> None:
        """Blocks were evicted, children before parents."""

    def cleared(self) -> None:
        """All cached blocks are gone."""


class SequenceListener(Protocol):
    """Owns one handle in the front, and is told about its sequence."""

    def on_event(self, event: m.Event) -> None:
        """Handle an event of the sequence other than tokens."""

    def on_token(self, token: int, finish: Finish, logprobs: Logprobs | None) -> None:
        """Handle the next token, with log-probabilities if the request wants them."""

    def on_lost(self) -> None:
        """Handle the loss of the engine, and with it of the sequence."""


class EngineSession:
    """The connection to one engine process. ``spawn_engine`` creates it, and ``end`` destroys it.
    All methods must be called in the event loop's thread, except ``send_slot`` and
    ``send_descriptor``, which any thread may call."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        arena: Arena,
        sock: socket.socket,
        slot_sock: socket.socket,
        cache: CacheListener | None = None,
    ) -> None:
        self.process = process
        self.arena = arena
        self.ready: m.EngineReady | None = None
        self.beat = m.EngineBeat(0, 0, 0, 0)
        self.loading = "starting"  # what the engine said last that it is doing, before it is ready
        self.alive = True
        self.inbound = arena.shape.inbound_slots()
        self.on_inbound_free: Callable[[], None] = lambda: None
        self.on_load: Callable[[], None] = lambda: None  # it may have changed
        self.on_pair_event: Callable[[PairEvent], None] = lambda event: None
        self._cache = cache
        self.silence = SilenceDetector()
        self._listeners: dict[int, SequenceListener] = {}
        self._outbox: list[m.Command] = []
        self._untaken = UntakenPrompts()
        self._socket = sock
        self._slots = SlotSender(slot_sock, self._on_slots_full)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None

    # ---- life -------------------------------------------------------------------------------

    async def open(self, report: ProgressReport) -> m.EngineReady:
        """Wait until the engine is loaded. Raise StartupError with its message, or EngineDied."""
        self._loop = asyncio.get_running_loop()
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        decoder: BatchDecoder[m.Event] = BatchDecoder(m.Event)
        while self.ready is None:
            for event in decoder.feed(await self._read()):
                if isinstance(event, m.Progress):
                    self.loading = event.what
                    report(event.what, event.fraction)
                elif isinstance(event, m.EngineFailed):
                    raise StartupError(event.why)
                elif isinstance(event, m.EngineReady):
                    self.ready = event
                    self.beat = m.EngineBeat(0, 0, 0, event.kv_tokens // BLOCK_TOKENS)  # all free
        self._decoder = decoder
        return self.ready

    async def _read(self) -> bytes:
        assert self._reader is not None
        try:
            data = await self._reader.read(1 << 18)
        except ConnectionError:
            data = b""
        if not data:
            loading = f" while it was {self.loading}" if self.ready is None else ""
            raise EngineDied(f"the engine process ended{loading}{await self._exit_reason()}")
        self.silence.heard()
        return data

    async def _exit_reason(self) -> str:
        """Return a clause about the signal or the status with which the process ended."""
        for _ in range(_EXIT_POLLS):  # its socket closes a moment before it can be reaped
            if (status := self.process.poll()) is not None:
                return exit_text(status)
            await asyncio.sleep(0.02)
        return ""

    async def listen(self) -> None:
        """Dispatch events until the engine process ends, and raise EngineDied with its own words,
        if it had any."""
        while True:
            for event in self._decoder.feed(await self._read()):
                if isinstance(event, m.EngineFailed):
                    raise EngineDied(event.why)
                try:
                    self._dispatch(event)
                except Exception:
                    # A bug of one listener must not stop the others.
                    log.exception("event %s", type(event).__name__)

    def end(self) -> None:
        """Kill the process if it still runs, and tell every listener. Idempotent."""
        if not self.alive:
            return
        self.alive = False
        self._stop_slot_writer()
        self._slots.close()
        self.arena.release_fd()
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1.0)
        if self._cache is not None:
            self._cache.cleared()
        lost, self._listeners = self._listeners, {}
        for listener in lost.values():
            try:
                listener.on_lost()
            except Exception:
                log.exception("reporting that the engine is lost")

    # ---- traffic ----------------------------------------------------------------------------

    def attach(self, handle: int, listener: SequenceListener) -> None:
        self._listeners[handle] = listener

    def detach(self, handle: int) -> None:
        self._listeners.pop(handle, None)

    def send(self, command: m.Command) -> None:
        """Queue a command; those of one iteration of the event loop are sent as one batch. Commands
        after the end of the session are dropped, because their listeners have been told."""
        if not self.alive:
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(command)

    def send_prompt(self, command: m.Generate | m.Prefill) -> None:
        """Queue a command to compute a prompt, which is load from now on."""
        tokens = len(command.request.context)
        self.send(command)
        digest = request_digest(command.request.id)
        self._untaken.add(min(command.expected_tokens or tokens, tokens), digest)
        self.on_load()

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        return self.beat.queued_tokens + self._untaken.tokens

    @property
    def queued_prompts(self) -> int:
        """Prompts that these tokens are of."""
        return self.beat.queued_prompts + self._untaken.prompts

    @property
    def latest_prompts(self) -> Collection[int]:
        """Digests of the prompts that were sent last: they are in the two figures above, unless
        they are computed already."""
        return self._untaken.latest.digests()

    def _flush(self) -> None:
        batch, self._outbox = self._outbox, []
        if self.alive and self._writer is not None:
            self._writer.write(encode_batch(batch))

    def send_slot(self, command: m.SlotCommand) -> None:
        """Send a command to the copy thread at once. Commands after the end of the session are
        dropped."""
        self._slots.send(command)

    def send_descriptor(self, fd: int) -> None:
        """Send a duplicate of ``fd``, another worker's arena, before its ``MapArena``."""
        self._slots.send_descriptor(fd)

    def _on_slots_full(self) -> None:
        """Continue to send when the socket accepts more, or end an engine that has lost commands.
        Called by any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._continue_slots)

    def _continue_slots(self) -> None:
        if self.alive and self._slots.broken:
            log.error("the engine does not read slot commands: it is replaced")
            self.process.kill()
        elif self.alive and self._loop is not None and not self._slots.flush():
            self._loop.add_writer(self._slots.fileno(), self._flush_slots)

    def _flush_slots(self) -> None:
        if self._slots.flush():
            self._stop_slot_writer()

    def _stop_slot_writer(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_writer(self._slots.fileno())

    def _dispatch(self, event: m.Event) -> None:
        if isinstance(event, m.TokensDrawn):
            reports = event.logprobs or [None] * len(event.handles)
            columns = zip(event.handles, event.tokens, event.finishes, reports, strict=True)
            for handle, token, finish, logprobs in columns:
                if (listener := self._listeners.get(handle)) is not None:
                    listener.on_token(token, finish, logprobs)
        elif isinstance(event, m.EngineBeat):
            self.beat = event
            self._untaken.drop_taken(event.prompts_taken)
            self.on_load()
        elif isinstance(event, m.CacheChanged):
            self._tell_cache(event)
        elif isinstance(event, m.SlotsFree):
            self.inbound += event.slots
            self.on_inbound_free()
        elif isinstance(event, PairEvent):
            self.on_pair_event(event)
        elif isinstance(event, m.Progress | m.EngineReady | m.EngineFailed):
            raise AssertionError(event)
        elif (listener := self._listeners.get(event.handle)) is not None:
            listener.on_event(event)
        elif isinstance(event, m.KVFrame):
            self.send_slot(m.SlotsFree([event.slot]))  # its transfer has ended in the meantime

    def _tell_cache(self, event: m.CacheChanged) -> None:
        if self._cache is None:
            return
        for stored, packed in event.changes:
            keys = [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]
            (self._cache.stored if stored else self._cache.evicted)(keys)


def spawn_engine(
    argv: list[str], settings: EngineSettings, cache: CacheListener | None = None
) -> EngineSession:
    """Start an engine process that inherits its two sockets and its arena, all without a name."""
    ours, theirs = socket.socketpair()
    our_slots, their_slots = socket.socketpair()
    arena = Arena.create(settings.arena)
    inherited = theirs.fileno(), arena.fd, their_slots.fileno()
    try:
        process = subprocess.Popen(
            [*argv, *map(str, inherited)], pass_fds=inherited, stdin=subprocess.PIPE
        )
    except OSError as error:
        for sock in (ours, our_slots):
            sock.close()
        arena.release_fd()
        raise StartupError(f"cannot start the engine process: {error}") from error
    finally:
        theirs.close()
        their_slots.close()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(msgspec.json.encode(settings))
    return EngineSession(process, arena, ours, our_slots, cache)
