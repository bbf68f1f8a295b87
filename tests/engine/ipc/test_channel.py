"""The engine's end of the socket, used by several threads."""

from __future__ import annotations

import socket
import threading

from engine.ipc import messages as m
from engine.ipc.channel import BatchDecoder, EngineChannel


def test_batches_of_several_threads_stay_whole() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # fills while threads send
    channel: EngineChannel[m.Command] = EngineChannel(ours, m.Command)
    count = 300

    def send(slot: int) -> None:
        for _ in range(count):
            channel.send([m.SlotsFree([slot] * 50)])

    threads = [threading.Thread(target=send, args=(slot,)) for slot in range(4)]
    for thread in threads:
        thread.start()
    decoder: BatchDecoder[m.Event] = BatchDecoder(m.Event)
    received: list[m.Event] = []
    theirs.settimeout(10)
    while len(received) < 4 * count:
        received += decoder.feed(theirs.recv(1 << 16))
        channel.receive(0.0)  # sends what the socket did not accept
    for thread in threads:
        thread.join()
    slots = [e.slots for e in received if isinstance(e, m.SlotsFree)]
    assert sorted(slots) == sorted([slot] * 50 for slot in range(4) for _ in range(count))
    ours.close()
    theirs.close()
