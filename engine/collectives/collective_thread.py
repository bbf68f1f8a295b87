"""The thread that carries out the operations of an engine's pairs, one at a time and in order.

    submit --> queue --> open | send | receive --> PairReady | SlotSent | SlotFilled
                             `--failed or overdue--> pair aborted --> PairClosed

A device takes part in one operation at a time, because collective kernels that wait for each other
on one device can block each other for ever. The step loop never waits for this thread.

Why many engines cannot block each other. An engine sends or receives, never both at a time, so each
is a prefill worker P or a decode worker D here (``PairGroups.open``). The front of D decides the
order (``kvtransfer/pairs/receive_turns.py``): it has requests at one P at a time, all on one stream
of control messages. P queues a send here for each request in the order in which they come, and
says so, whereupon D queues its receives here in that order.

- Assume that P waits in a send to D. D has a request at P, hence at no other engine, so every
  receive that D has queued is from P, in the order of P's sends. Receives before the matching one
  match earlier sends of P, which are complete. Fronts wait for no engine, so D is told of the
  send and comes to the matching receive without waiting for another engine: the send completes.
- So every send completes, and P reaches each request in its queue, which is finite. Hence every
  receive completes, too.

Connecting a pair is part of this order: D opens it as the first of its requests at that P. Peers
that stop or do not keep to the order are ended by the deadlines: a send takes SEND_S at most, and a
receive waits for RECEIVE_S, so that a P that waits for one dead D keeps its other pairs.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from engine.collectives.pair_groups import PairGroups
from engine.ipc.channel import ChannelClosed
from engine.ipc.pair_messages import (
    ClosePair,
    OpenPair,
    PairClosed,
    PairCommand,
    PairEvent,
    PairReady,
    PairReceive,
    PairSend,
    PairValue,
    SlotFilled,
    SlotSent,
)
from protocol.errors import CarrierFailed

SEND_S = 1.0
RECEIVE_S = 3.0


class CollectiveThread:
    """One engine's thread for pairs. The engine process creates it when a front first opens a pair,
    and closes it when it ends.

    ``slot`` returns the first bytes of a slot as a tensor of bytes on the device of ``groups``, and
    raises ValueError if there is no such slot. ``report`` sends events, and is called in this
    thread."""

    def __init__(
        self,
        groups: PairGroups,
        slot: Callable[[int, int], torch.Tensor],
        report: Callable[[Sequence[PairEvent]], None],
    ) -> None:
        self._groups = groups
        self._slot = slot
        self._report = report
        self._queue: queue.SimpleQueue[PairCommand | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the two fields below
        self._queued: Counter[str] = Counter()  # commands of each pair that are not done
        self._ended: set[str] = set()  # pairs that a queued ClosePair ends
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="collectives", daemon=True)
        self._thread.start()

    # ---- any thread --------------------------------------------------------------------------

    def submit(self, command: PairCommand) -> None:
        """Queue a command. Never blocks. A value of the other end takes effect at once, and so does
        the end of a pair on commands that have not begun."""
        if isinstance(command, PairValue):
            self._groups.deliver(command)
            return
        if isinstance(command, OpenPair):
            self._groups.prepare(command.pair)
        with self._lock:
            self._queued[command.pair] += 1
            if isinstance(command, ClosePair):
                self._ended.add(command.pair)
                self._groups.cancel(command.pair)
        self._queue.put(command)

    def close(self, wait_s: float = RECEIVE_S) -> bool:
        """End the thread after the operation in progress, and close all pairs. Return whether it
        has ended within ``wait_s``; a daemon thread, it ends with the process otherwise."""
        self._closing = True
        self._queue.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    # ---- this thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (command := self._queue.get()) is not None and not self._closing:
                self._report(self._answer(command))
        except ChannelClosed:
            pass  # the engine ends
        finally:
            self._groups.close_all()

    def _answer(self, command: PairCommand) -> list[PairEvent]:
        pair = command.pair
        try:
            if pair in self._ended and not isinstance(command, ClosePair):
                return []  # answered by the queued ClosePair
            return self._carry_out(command)
        except (CarrierFailed, ValueError) as error:
            self._groups.close(pair)
            return [PairClosed(pair, str(error))]
        finally:
            self._count_done(command)

    def _carry_out(self, command: PairCommand) -> list[PairEvent]:
        pair = command.pair
        match command:
            case OpenPair(rank=rank):
                return self._open(pair, rank)
            case PairSend(handle=handle, sequence=sequence):
                data = self._slot(command.slot, command.nbytes)
                self._groups.send(pair, data, SEND_S)
                return [SlotSent(pair, handle, sequence)]
            case PairReceive(handle=handle, sequence=sequence):
                data = self._slot(command.slot, command.nbytes)
                self._groups.receive(pair, data, RECEIVE_S)
                return [SlotFilled(pair, handle, sequence)]
            case _:
                self._groups.close(pair)
                return [PairClosed(pair, "")]

    def _open(self, pair: str, rank: int) -> list[PairEvent]:
        with self._lock:
            in_use = {other for other, commands in self._queued.items() if commands}
        dropped = self._groups.open(pair, rank, in_use)
        why = "it was idle, and another pair needed its place"
        return [PairReady(pair), *(PairClosed(other, why) for other in dropped)]

    def _count_done(self, command: PairCommand) -> None:
        with self._lock:
            self._queued[command.pair] -= 1
            if not self._queued[command.pair]:
                del self._queued[command.pair]
            if isinstance(command, ClosePair):
                self._ended.discard(command.pair)
