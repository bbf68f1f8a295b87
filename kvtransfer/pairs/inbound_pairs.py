"""D's end: the pairs by which the engine of one session receives.

    admitted --turn--> asked --P sends it--> receiving --SlotFilled--> arrived
                         `----PairClosed------`--> asked once more by a new pair, or the link fails

The engine connects and receives when P has said that its engine does the same. So a request that
is lost with its control stream, as when a transfer is cancelled, costs the engine no time.

A pair that has carried frames may be gone at the other end (dropped there, or its engine was
replaced), which shows with the next frame only. So its frames are asked for once more by a new
pair. P keeps a slot until it is told that the frame was taken.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from dataclasses import dataclass, field
from typing import Protocol

from engine.ipc.pair_messages import (
    ClosePair,
    OpenPair,
    PairClosed,
    PairEvent,
    PairReceive,
    PairValue,
    SlotFilled,
)
from engine.process.session import EngineSession
from kvtransfer.pairs.receive_turns import ReceiveTurns
from protocol.errors import CarrierFailed, TransferFailed
from protocol.wire import wire_pb2 as pb

CLOSE_S = 0.5
"""How long frames under way may take when their transfer is over. Then their pair is closed."""

STUCK_S = 10.0
"""After so long, more than any operation may take, the thread of an engine counts as stuck."""


class ReceivingLink(Protocol):
    """D's end of one transfer, as this module sees it."""

    transfer: bytes
    peer: str  # identity of P's engine

    def place_of(self, sequence: int) -> tuple[int, int]:
        """Return the slot and the bytes of an admitted frame."""

    def say(self, message: pb.PairMessage) -> None:
        """Send a message on the control stream."""

    def arrived(self, sequence: int) -> None:
        """The frame lies in its slot."""

    def fail(self, error: CarrierFailed) -> None: ...


@dataclass
class _InboundPair:
    id: str
    opener: ReceivingLink  # whose control stream carries the values
    opened: bool = False  # the engine knows it
    proven: bool = False  # a frame has come
    asked: dict[tuple[int, int], ReceivingLink] = field(default_factory=dict)
    receiving: set[tuple[int, int]] = field(default_factory=set)  # of those asked


class InboundPairs:
    """The receiving pairs of one engine session. ``NcclCarrier`` creates it. Event loop only."""

    def __init__(self, session: EngineSession, host: str) -> None:
        self._session = session
        self._host = host
        self._turns = ReceiveTurns()
        self._numbers = itertools.count(1)
        self._links: dict[bytes, tuple[ReceivingLink, int]] = {}  # by transfer
        self._pairs: dict[str, _InboundPair] = {}  # by id
        self._ids: dict[str, str] = {}  # peer -> the pair to use
        self._retried: set[tuple[int, int]] = set()
        self._changed = asyncio.Event()

    @property
    def links(self) -> int:
        return len(self._links)

    def add(self, link: ReceivingLink) -> int:
        """Return a number for a link."""
        number = next(self._numbers)
        self._links[link.transfer] = link, number
        return number

    def want(self, link: ReceivingLink, sequence: int) -> None:
        """Receive a frame that is admitted and lies in a slot of P."""
        self._turns.add(link.transfer, [sequence])
        self._ask()

    def deliver(self, link: ReceivingLink, message: pb.PairMessage) -> None:
        """P has opened the pair, or sends frames. What concerns no pair with P is ignored, because
        the pair may be closed here."""
        if self._ids.get(link.peer) != message.pair:
            return
        pair = self._pairs[message.pair]
        if not pair.opened:
            pair.opened = True
            self._session.send_slot(OpenPair(pair.id, 1, self._host))
        for key, value in message.values.items():
            self._session.send_slot(PairValue(pair.id, key, value))
        for sequence in message.sequences:
            self._receive(pair, link, sequence)

    def _receive(self, pair: _InboundPair, link: ReceivingLink, sequence: int) -> None:
        entry = self._links[link.transfer][1], sequence
        if entry not in pair.asked or entry in pair.receiving:
            raise TransferFailed(f"frame {sequence} is sent, and was not asked for")
        pair.receiving.add(entry)
        self._session.send_slot(PairReceive(pair.id, *entry, *link.place_of(sequence)))

    async def remove(self, link: ReceivingLink, number: int) -> None:
        """Forget a link. Return when its slots are written no more. Idempotent.

        A receive that has begun ends by its deadline at the latest. An engine whose thread is stuck
        is ended, because nothing else ends a write to its slots."""
        self._turns.forget(link.transfer)
        self._links.pop(link.transfer, None)
        for pair in [p for p in self._pairs.values() if _lacks_answer(p, number)]:
            self._close(pair)
        if not await self._wait_for_slots(number, CLOSE_S):
            for pair in [p for p in self._pairs.values() if _asks(p, number)]:
                self._close(pair)
            if not await self._wait_for_slots(number, STUCK_S):
                self._session.end()
        self._retried = {entry for entry in self._retried if entry[0] != number}

    def _close(self, pair: _InboundPair) -> None:
        if pair.opened:
            self._session.send_slot(ClosePair(pair.id))
        else:
            self._on_closed(pair, "")

    async def _wait_for_slots(self, number: int, wait_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + wait_s
        while self._session.alive and any(_asks(pair, number) for pair in self._pairs.values()):
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                return False
        return True

    # ---- asking -----------------------------------------------------------------------------

    def _ask(self) -> None:
        while (turn := self._turns.ask()) is not None:
            transfer, sequences = turn
            link, number = self._links[transfer]
            opening = link.peer not in self._ids
            pair = self._add_pair(link) if opening else self._pairs[self._ids[link.peer]]
            for sequence in sequences:
                pair.asked[number, sequence] = link
            link.say(pb.PairMessage(pair=pair.id, open=opening, sequences=sequences))

    def _add_pair(self, link: ReceivingLink) -> _InboundPair:
        pair = _InboundPair(secrets.token_hex(16), link)
        self._pairs[pair.id] = pair
        self._ids[link.peer] = pair.id
        return pair

    # ---- events of the engine ---------------------------------------------------------------

    def knows(self, pair: str) -> bool:
        return pair in self._pairs

    def on_event(self, event: PairEvent) -> None:
        pair = self._pairs[event.pair]
        if isinstance(event, PairValue):
            pair.opener.say(pb.PairMessage(pair=pair.id, values={event.key: event.value}))
        elif isinstance(event, SlotFilled):
            link = pair.asked.pop((event.handle, event.sequence))
            pair.receiving.discard((event.handle, event.sequence))
            pair.proven = True
            self._turns.done(link.transfer, event.sequence)
            if link.transfer in self._links:
                link.arrived(event.sequence)
        elif isinstance(event, PairClosed):
            self._on_closed(pair, event.why)
        self._changed.set()
        self._ask()

    def _on_closed(self, pair: _InboundPair, why: str) -> None:
        del self._pairs[pair.id]
        if self._ids.get(pair.opener.peer) == pair.id:
            del self._ids[pair.opener.peer]
        for (number, sequence), link in pair.asked.items():
            self._turns.done(link.transfer, sequence)
            if link.transfer not in self._links:
                continue
            if pair.proven and (number, sequence) not in self._retried:
                self._retried.add((number, sequence))
                self._turns.add(link.transfer, [sequence])
            else:
                link.fail(CarrierFailed(f"nccl: {why or 'the pair was closed'}"))


def _lacks_answer(pair: _InboundPair, number: int) -> bool:
    return any(entry[0] == number for entry in pair.asked if entry not in pair.receiving)


def _asks(pair: _InboundPair, number: int) -> bool:
    return any(entry[0] == number for entry in pair.asked)
