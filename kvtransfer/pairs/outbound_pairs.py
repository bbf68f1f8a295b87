"""P's end: the pairs by which the engine of one session sends.

    PairMessage{open} --> OpenPair
    PairMessage{sequences} --> PairSend ... SlotSent
                           `--> the same message back: D receives now

The other worker says which frames it receives, and in which order. What it says is checked: it may
use its own pairs, and ask for frames that wait for it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

from engine.ipc.pair_messages import (
    MAX_PAIR_VALUE_BYTES,
    ClosePair,
    OpenPair,
    PairClosed,
    PairEvent,
    PairReady,
    PairSend,
    PairValue,
    SlotSent,
)
from engine.process.session import EngineSession
from protocol.errors import TransferFailed
from protocol.wire import wire_pb2 as pb

MAX_PAIRS = 256
_MAX_ID = 64


class SendingLink(Protocol):
    """P's end of one transfer, as this module sees it."""

    owner: str  # identity of D

    def begin_send(self, sequence: int, pair: str) -> tuple[int, int]:
        """Return the slot and the bytes of a frame, which stays there until ``end_send``. Raise
        TransferFailed if the frame does not wait, or is being sent by this pair."""

    def end_send(self, sequence: int, pair: str) -> None:
        """The engine does not read the slot for this pair any more."""

    def say(self, message: pb.PairMessage) -> None:
        """Send a message on the control stream."""


@dataclass
class _OutboundPair:
    owner: str
    opener: SendingLink  # whose control stream carries the values
    sending: dict[tuple[int, int], SendingLink]
    ready: bool = False  # connected


class OutboundPairs:
    """The sending pairs of one engine session. ``NcclCarrier`` creates it. Event loop only."""

    def __init__(self, session: EngineSession, host: str) -> None:
        self._session = session
        self._host = host
        self._numbers = itertools.count(1)
        self._links: dict[int, SendingLink] = {}
        self._pairs: dict[str, _OutboundPair] = {}

    @property
    def alive(self) -> bool:
        """Whether the engine lives; a dead one reads no slot."""
        return self._session.alive

    @property
    def links(self) -> int:
        return len(self._links)

    def add(self, link: SendingLink) -> int:
        """Return a number for a link."""
        number = next(self._numbers)
        self._links[number] = link
        return number

    def remove(self, number: int) -> None:
        """Forget a link. What its engine still sends for it ends with ``end_send``. A pair that is
        being connected through the link's control stream cannot be connected any more."""
        link = self._links.pop(number, None)
        for name, pair in self._pairs.items():
            if pair.opener is link and not pair.ready:
                self._session.send_slot(ClosePair(name))

    def on_message(self, link: SendingLink, number: int, message: pb.PairMessage) -> None:
        """Do what the other worker asks for. Raises TransferFailed if it may not."""
        name = message.pair
        if message.open:
            self._open(link, name)
        pair = self._pairs.get(name)
        if pair is None:
            return  # closed in the meantime; its connection is closed, which the other end notices
        if pair.owner != link.owner:
            raise TransferFailed("a message about another worker's pair")
        for key, value in message.values.items():
            if len(value) > MAX_PAIR_VALUE_BYTES:
                raise TransferFailed(f"a value of {len(value)} bytes for a pair")
            self._session.send_slot(PairValue(name, key, value))
        for sequence in message.sequences:
            slot, nbytes = link.begin_send(sequence, name)
            pair.sending[number, sequence] = link
            self._session.send_slot(PairSend(name, number, sequence, slot, nbytes))
        if message.sequences:
            link.say(pb.PairMessage(pair=name, sequences=message.sequences))

    def _open(self, link: SendingLink, name: str) -> None:
        if not 0 < len(name) <= _MAX_ID or name in self._pairs:
            raise TransferFailed(f"a pair cannot be opened as {name[:_MAX_ID]!r}")
        if len(self._pairs) >= MAX_PAIRS:
            raise TransferFailed(f"more than {MAX_PAIRS} pairs")
        self._pairs[name] = _OutboundPair(link.owner, link, {})
        self._session.send_slot(OpenPair(name, 0, self._host))

    # ---- events of the engine ---------------------------------------------------------------

    def knows(self, pair: str) -> bool:
        return pair in self._pairs

    def on_event(self, event: PairEvent) -> None:
        pair = self._pairs[event.pair]
        if isinstance(event, PairValue):
            pair.opener.say(pb.PairMessage(pair=event.pair, values={event.key: event.value}))
        elif isinstance(event, PairReady):
            pair.ready = True
        elif isinstance(event, SlotSent):
            pair.sending.pop((event.handle, event.sequence)).end_send(event.sequence, event.pair)
        elif isinstance(event, PairClosed):
            del self._pairs[event.pair]
            for (_, sequence), link in pair.sending.items():
                link.end_send(sequence, event.pair)
