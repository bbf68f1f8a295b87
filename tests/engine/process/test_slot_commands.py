"""A front's slot commands reach the engine's copy thread, also when their socket is full."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from engine.ipc import messages as m
from engine.ipc.shared_memory import Arena, ArenaShape
from engine.ipc.slot_channel import SlotReceiver
from engine.process.session import EngineSession

COMMANDS = 5000


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for an engine."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


async def test_commands_from_every_thread_arrive_in_order_once_the_engine_reads(
    process: subprocess.Popen[bytes],
) -> None:
    ours, theirs = socket.socketpair()
    our_slots, their_slots = socket.socketpair()
    arena = Arena.create(ArenaShape(slot_bytes=64, inbound=1, outbound=1))
    session = EngineSession(process, arena, ours, our_slots)
    session._loop = asyncio.get_running_loop()  # as ``open`` does
    receiver = SlotReceiver(their_slots)

    def send() -> None:
        for frames in range(COMMANDS):
            session.send_slot(m.Grant(1, frames))
        session.send_descriptor(arena.fd)
        session.send_slot(m.MapArena(1, 64, 2))

    thread = threading.Thread(target=send)
    thread.start()
    await asyncio.to_thread(thread.join)  # nothing has been read, and nobody waited
    received: list[m.SlotCommand] = []
    async with asyncio.timeout(20):
        while m.MapArena(1, 64, 2) not in received[-1:]:
            received += await asyncio.to_thread(receiver.receive, 0.01)
    assert [c.frames for c in received[:-1] if isinstance(c, m.Grant)] == list(range(COMMANDS))
    assert receiver.take_descriptor() > 0
    session.end()
    session.send_slot(m.Grant(1, 1))  # dropped
    assert process.wait(5) is not None and arena.fd == -1
    theirs.close()
    receiver.close()
