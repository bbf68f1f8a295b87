"""Messages about pairs: connections of a collective library (NCCL, gloo) between two engines.

A pair connects the engine of a prefill worker (P, rank 0) with that of a decode worker (D, rank 1).
The front of D draws its id, never twice the same. The commands travel on the socket for slots, and
the engine's ``CollectiveThread`` carries them out in order. Each pair has one life:

    OpenPair --> PairValue (both directions, relayed to the other engine) --> PairReady
             --> PairSend or PairReceive, each answered by SlotSent or SlotFilled
             --> PairClosed, at ClosePair or after any failure

``PairClosed`` answers everything that is still unanswered for the pair: from then on the engine
touches no slot for it. A command for a pair that is not open is answered by ``PairClosed``, too.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

MAX_PAIR_VALUE_BYTES = 64 << 10


class _PairMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pair: str


class PairValue(_PairMessage, frozen=True):
    """A value by which the two ends of a pair find each other, such as a socket's address. Each
    front passes the event of its engine on to the other front, which makes a command of it."""

    key: str
    value: bytes


# ---- front -> engine -----------------------------------------------------------------------


class OpenPair(_PairMessage, frozen=True):
    """Connect to the other engine, which is told the same. Answered by ``PairReady``."""

    rank: int  # 0: the prefill worker's engine; 1: the decode worker's
    host: str  # where the library may listen; the same in every command of a front


class PairSend(_PairMessage, frozen=True):
    """Send the first ``nbytes`` of ``slot``, frame ``sequence`` of ``handle``. The other front has
    said that it sends the ``PairReceive``. Answered by ``SlotSent``."""

    handle: int
    sequence: int
    slot: int
    nbytes: int


class PairReceive(_PairMessage, frozen=True):
    """Receive ``nbytes`` into ``slot``. Answered by ``SlotFilled``. A receive cannot be cancelled:
    the slot belongs to it until it is answered."""

    handle: int
    sequence: int
    slot: int
    nbytes: int


class ClosePair(_PairMessage, frozen=True):
    """End the connection. Commands that have not begun are not carried out."""


PairCommand: TypeAlias = OpenPair | PairValue | PairSend | PairReceive | ClosePair


# ---- engine -> front -----------------------------------------------------------------------


class PairReady(_PairMessage, frozen=True):
    """The pair is connected."""


class SlotSent(_PairMessage, frozen=True):
    """The frame has left its slot, which may be filled anew."""

    handle: int
    sequence: int


class SlotFilled(_PairMessage, frozen=True):
    """The frame lies in its slot. Its bytes have not been checked."""

    handle: int
    sequence: int


class PairClosed(_PairMessage, frozen=True):
    """The pair is gone, and its commands without an answer with it. ``why`` is empty after
    ``ClosePair``."""

    why: str


PairEvent: TypeAlias = PairValue | PairReady | SlotSent | SlotFilled | PairClosed
