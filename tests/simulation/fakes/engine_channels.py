"""What joins a front and its simulated engine: the two sockets, and the handle of the process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engine.ipc.channel import BatchDecoder, ChannelClosed
from tests.simulation.fakes.virtual_loop import SimProcess

if TYPE_CHECKING:
    from tests.simulation.fakes.engine_process import SimEngine


class Pipe:
    """One end of a socket pair: the front's transport, whose other end is the engine."""

    def __init__(self, engine: SimEngine, front: SimProcess) -> None:
        self._engine, self._front = engine, front
        self._protocol: Any = None
        self._waiting: list[bytes] = []
        self._closed = False

    def connect_protocol(self, protocol: Any) -> Pipe:
        self._protocol = protocol
        protocol.connection_made(self)
        for data in self._waiting:
            protocol.data_received(data)
        return self

    def take(self, data: bytes) -> None:
        """Bytes of the engine have come to the front; none: the end."""
        if self._closed:
            return
        if self._protocol is None:
            self._waiting.append(data)
        elif data:
            self._protocol.data_received(data)
        else:
            self._protocol.eof_received()
            self._protocol.connection_lost(None)

    def write(self, data: bytes) -> None:
        self._engine.send_to(self._engine.commands.take, bytes(data))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.send_to(self._engine.commands.take, b"")

    def is_closing(self) -> bool:
        return self._closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class SlotSocket:
    """The front's end of the slot channel, as ``SlotSender`` uses a socket."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    def setblocking(self, flag: bool) -> None:
        pass

    def fileno(self) -> int:
        return -1

    def sendmsg(self, buffers: Sequence[bytes], ancillary: Any = ()) -> int:
        data = b"".join(buffers)
        self._engine.send_to(self._engine.slots.take, data)
        return len(data)

    def close(self) -> None:
        self._engine.send_to(self._engine.slots.take, b"")


class EngineEnd:
    """The engine's end of a channel: what ``EngineChannel`` and ``SlotReceiver`` offer."""

    def __init__(self, kind: Any, on_message: Callable[[], None]) -> None:
        self._decoder: BatchDecoder[Any] = BatchDecoder(kind)
        self._on_message = on_message
        self._inbox: list[Any] = []
        self._closed = False
        self.send: Callable[[Sequence[Any]], None] = lambda messages: None

    def take(self, data: bytes) -> None:
        if data:
            self._inbox += self._decoder.feed(data)
        else:
            self._closed = True
        self._on_message()

    def receive(self, wait_s: float) -> list[Any]:
        if self._closed:
            raise ChannelClosed
        taken, self._inbox = self._inbox, []
        return taken

    def wake(self) -> None:
        self._on_message()

    def take_descriptor(self) -> int:
        raise LookupError("no descriptor crosses a simulated socket")

    def close(self) -> None:
        pass


class SimPopen:
    """Stands for the ``subprocess.Popen`` of an engine."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self.pid = 1000

    def poll(self) -> int | None:
        return self._engine.returncode

    def kill(self) -> None:
        self._engine.process.kill()

    def wait(self, timeout: float | None = None) -> int:
        if self._engine.returncode is None:
            raise subprocess.TimeoutExpired("engine", timeout or 0.0)
        return self._engine.returncode
