"""One life of an engine process, as its front sees it: arena, socket, who listens for what.

A session ends once and for all when the process dies, or when its front kills it because it stopped
answering; whatever was in it is lost then, and every listener is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.ipc import messages as m
from engine.ipc.channel import Framer, pack
from engine.ipc.shared_memory import Arena
from engine.ipc.spec import EngineSpec
from protocol.block_keys import BLOCK_TOKENS, KEY_BYTES
from protocol.errors import EngineDied, StartupError
from protocol.liveness import Silence
from protocol.requests import Finish, Logprobs

log = logging.getLogger("baton.engine")

Report = Callable[[str, float], None]
"""(what is being done, fraction of it done)"""


class CacheListener(Protocol):
    """Who is told what the engine's prefix cache holds."""

    def stored(self, keys: list[bytes]) -> None:
        """Blocks that came, parents before children."""

    def evicted(self, keys: list[bytes]) -> None:
        """Blocks that went, children before parents."""

    def cleared(self) -> None:
        """Nothing is cached any more."""


class Listener(Protocol):
    """Who owns a handle in the front."""

    def on_event(self, event: m.Event) -> None:
        """An event of this handle other than tokens."""

    def on_token(self, token: int, finish: Finish, logprobs: Logprobs | None) -> None:
        """The next token of this handle, with log-probabilities if it asked for them."""

    def on_lost(self) -> None:
        """The engine is gone, and the sequence with it."""


class Session:
    """Talks to one engine process. All methods belong to the event loop's thread."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        arena: Arena,
        sock: socket.socket,
        cache: CacheListener | None = None,
    ) -> None:
        self.process = process
        self.arena = arena
        self.ready: m.Ready | None = None
        self.beat = m.Beat(0, 0, 0, 0)
        self.alive = True
        self.inbound = arena.shape.inbound_slots()
        self.on_inbound_free: Callable[[], None] = lambda: None
        self._cache = cache
        self.silence = Silence()
        self._listeners: dict[int, Listener] = {}
        self._outbox: list[m.Command] = []
        self._socket = sock
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None

    # ---- life -------------------------------------------------------------------------------

    async def open(self, report: Report) -> m.Ready:
        """Wait for the engine to load. Raises StartupError with its own words, or EngineDied."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        framer: Framer[m.Event] = Framer(m.Event)
        while self.ready is None:
            for event in framer.feed(await self._read()):
                if isinstance(event, m.Progress):
                    report(event.what, event.fraction)
                elif isinstance(event, m.Failed):
                    raise StartupError(event.why)
                elif isinstance(event, m.Ready):
                    self.ready = event
                    self.beat = m.Beat(0, 0, 0, event.kv_tokens // BLOCK_TOKENS)  # all free
        self._framer = framer
        return self.ready

    async def _read(self) -> bytes:
        assert self._reader is not None
        try:
            data = await self._reader.read(1 << 18)
        except ConnectionError:
            data = b""
        if not data:
            raise EngineDied("the engine process ended")
        self.silence.heard()
        return data

    async def listen(self) -> None:
        """Dispatch events until the engine is gone (EngineDied)."""
        while True:
            for event in self._framer.feed(await self._read()):
                try:
                    self._dispatch(event)
                except Exception:
                    # A bug in whoever listens must not deafen the others.
                    log.exception("event %s", type(event).__name__)

    def end(self) -> None:
        """Kill the process if it lives, and tell every listener. Idempotent."""
        if not self.alive:
            return
        self.alive = False
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
                log.exception("telling that the engine is lost")

    # ---- traffic ----------------------------------------------------------------------------

    def attach(self, handle: int, listener: Listener) -> None:
        self._listeners[handle] = listener

    def detach(self, handle: int) -> None:
        self._listeners.pop(handle, None)

    def send(self, command: m.Command) -> None:
        """Queue a command; all of one turn of the event loop go as one batch. After the end of the
        session it is dropped: its listener has been told."""
        if not self.alive:
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(command)

    def _flush(self) -> None:
        batch, self._outbox = self._outbox, []
        if self.alive and self._writer is not None:
            self._writer.write(pack(batch))

    def _dispatch(self, event: m.Event) -> None:
        if isinstance(event, m.Tokens):
            reports = event.logprobs or [None] * len(event.handles)
            columns = zip(event.handles, event.tokens, event.finishes, reports, strict=True)
            for handle, token, finish, logprobs in columns:
                if (listener := self._listeners.get(handle)) is not None:
                    listener.on_token(token, finish, logprobs)
        elif isinstance(event, m.Beat):
            self.beat = event
        elif isinstance(event, m.Cached):
            self._tell_cache(event)
        elif isinstance(event, m.SlotsFree):
            self.inbound += event.slots
            self.on_inbound_free()
        elif isinstance(event, m.Progress | m.Ready | m.Failed):
            raise AssertionError(event)
        elif (listener := self._listeners.get(event.handle)) is not None:
            listener.on_event(event)
        elif isinstance(event, m.Frame):
            self.send(m.SlotsFree([event.slot]))  # its transfer has ended meanwhile

    def _tell_cache(self, event: m.Cached) -> None:
        if self._cache is None:
            return
        for stored, packed in event.changes:
            keys = [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]
            (self._cache.stored if stored else self._cache.evicted)(keys)


def spawn(argv: list[str], spec: EngineSpec, cache: CacheListener | None = None) -> Session:
    """Start an engine process that inherits its socket and arena; nothing has a name."""
    ours, theirs = socket.socketpair()
    arena = Arena.create(spec.arena)
    try:
        process = subprocess.Popen(
            [*argv, str(theirs.fileno()), str(arena.fd)],
            pass_fds=(theirs.fileno(), arena.fd),
            stdin=subprocess.PIPE,
        )
    except OSError as error:
        ours.close()
        raise StartupError(f"cannot start the engine process: {error}") from error
    finally:
        theirs.close()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(msgspec.json.encode(spec))
    arena.release_fd()
    return Session(process, arena, ours, cache)
