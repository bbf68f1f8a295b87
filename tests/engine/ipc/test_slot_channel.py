"""The socket of slot commands: order, descriptors, a full socket, wake-ups and its end."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from engine.ipc import messages as m
from engine.ipc.channel import ChannelClosed
from engine.ipc.slot_channel import SlotReceiver, SlotSender


class Pair:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.full = 0
        self.sender = SlotSender(ours, self._on_full)
        self.receiver = SlotReceiver(theirs)

    def _on_full(self) -> None:
        self.full += 1


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.sender.close()
    made.receiver.close()


def test_commands_arrive_in_order_from_any_thread(pair: Pair) -> None:
    def send(handle: int) -> None:
        for frames in range(200):
            pair.sender.send(m.Grant(handle, frames))

    threads = [threading.Thread(target=send, args=(handle,)) for handle in range(4)]
    for thread in threads:
        thread.start()
    received: list[m.SlotCommand] = []
    while len(received) < 800:
        received += pair.receiver.receive(10.0)
        pair.sender.flush()
    for handle in range(4):
        own = [c.frames for c in received if isinstance(c, m.Grant) and c.handle == handle]
        assert own == list(range(200))
    for thread in threads:
        thread.join()


def test_descriptor_comes_before_its_command_also_when_the_socket_is_full(pair: Pair) -> None:
    while not pair.full:
        pair.sender.send(m.SlotsFree(list(range(100))))
    read, write = os.pipe()
    pair.sender.send_descriptor(read)
    pair.sender.send(m.MapArena(5, 10, 1))
    os.close(read)
    received: list[m.SlotCommand] = []
    while m.MapArena(5, 10, 1) not in received:
        received += pair.receiver.receive(1.0)
        pair.sender.flush()
    fd = pair.receiver.take_descriptor()
    os.write(write, b"pipe")
    assert os.read(fd, 10) == b"pipe"
    os.close(fd)
    os.close(write)
    with pytest.raises(LookupError):
        pair.receiver.take_descriptor()


def test_wake_ends_a_wait_and_is_not_lost(pair: Pair) -> None:
    pair.receiver.wake()
    assert pair.receiver.receive(10.0) == []
    timer = threading.Timer(0.05, pair.receiver.wake)
    began = time.monotonic()
    timer.start()
    assert pair.receiver.receive(10.0) == []
    assert time.monotonic() - began < 9.0
    began = time.monotonic()
    assert pair.receiver.receive(0.01) == []
    assert time.monotonic() - began >= 0.009, "a wake-up counts once"


def test_closed_socket_is_told(pair: Pair) -> None:
    pair.sender.close()
    with pytest.raises(ChannelClosed):
        pair.receiver.receive(1.0)
    pair.sender.send(m.Grant(1, 1))  # dropped
    pair.sender.send_descriptor(0)


def test_engine_that_is_gone_is_no_error_of_the_sender(pair: Pair) -> None:
    pair.receiver.close()
    pair.sender.send(m.Grant(1, 1))
    assert pair.sender.flush()


def test_sender_that_has_lost_commands_is_broken_and_says_so_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.ipc.slot_channel.MAX_QUEUED_BYTES", 10_000)
    while not pair.full:
        pair.sender.send(m.SlotsFree(list(range(100))))
    assert not pair.sender.broken
    for _ in range(100):
        pair.sender.send(m.SlotsFree(list(range(100))))
    assert pair.sender.broken and pair.full == 2
    assert pair.sender.flush(), "nothing is kept"


def test_engine_that_is_gone_does_not_break_the_sender(pair: Pair) -> None:
    pair.receiver.close()
    pair.sender.send(m.Grant(1, 1))
    assert not pair.sender.broken and not pair.full
