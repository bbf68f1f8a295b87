"""Events wait for their work on the GPU in a thread of their own."""

from __future__ import annotations

import threading

from engine.ipc import messages as m
from engine.ipc.channel import ChannelClosed
from engine.process.slot_copies import SenderThread
from tests.engine.process.fake_copies import FakeWork


class Gate(FakeWork):
    """Work that a thread can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._open = threading.Event()

    def wait(self) -> None:
        assert self._open.wait(10)

    def finish(self) -> None:
        self._open.set()


def test_thread_sends_events_after_their_work_in_order() -> None:
    sent: list[m.Event] = []
    arrived = threading.Semaphore(0)

    def send(events: object) -> None:
        sent.extend(events)  # type: ignore[arg-type]
        arrived.release()

    thread = SenderThread(send, "test")
    first, second = Gate(), Gate()
    thread.send_after(first, [m.SlotsFree([1])])
    thread.send_after(second, [m.SlotsFree([2])])
    second.finish()
    assert not arrived.acquire(timeout=0.05) and sent == []
    first.finish()
    thread.close()
    assert sent == [m.SlotsFree([1]), m.SlotsFree([2])]


def test_thread_ends_when_the_front_is_gone() -> None:
    def send(_events: object) -> None:
        raise ChannelClosed

    thread = SenderThread(send, "test")
    done = Gate()
    done.finish()
    thread.send_after(done, [m.SlotsFree([1])])
    thread._thread.join(10)
    assert not thread._thread.is_alive()
    thread.close()
