"""What a front and its mover say to each other, and the address of a mover that serves slots.

The socket between them keeps the bounds of messages (SOCK_SEQPACKET), so that one packet is one
message. An address comes from another worker and is not trusted: ``MoverAddress.decode`` checks it.
"""

from __future__ import annotations

import base64
import binascii
from typing import TypeAlias

import msgspec

from protocol.errors import CarrierFailed, TransferFailed

MAX_METADATA_BYTES = 32 << 10
"""Of one agent. It grows with the network interfaces of a host, by about 100 bytes for each."""

MAX_PACKET_BYTES = 2 * MAX_METADATA_BYTES

TOKEN_BYTES = 16
"""Of the random value by which a mover is recognised; its hexadecimal form is the agent's name."""

BEAT_S = 0.5

_MAX_MEMORY = 1 << 64


class MoverAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a mover that serves slots is found, and where in its memory the slots lie."""

    token: bytes
    metadata: bytes  # of its agent, for the library
    probe: int  # where in its memory the token lies
    slots_at: int  # where in its memory ``first_slot`` begins
    first_slot: int
    slots: int
    stride: int  # bytes from one slot to the next

    def encode(self) -> str:
        """Return the address as text for ``Accepted.address``."""
        return base64.b64encode(_encode(self)).decode()

    @classmethod
    def decode(cls, text: str) -> MoverAddress:
        """Return the address. Raises CarrierFailed if it is too long or makes no sense."""
        if len(text) > 2 * MAX_METADATA_BYTES:
            raise CarrierFailed(f"the NIXL address has {len(text)} characters, too many")
        try:
            address = _decode_address(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise CarrierFailed(f"the NIXL address cannot be read: {error}") from error
        if not address._makes_sense():
            raise CarrierFailed("the NIXL address has sizes or positions that cannot be right")
        return address

    def _makes_sense(self) -> bool:
        positive = min(self.probe, self.slots_at, self.slots, self.stride) > 0
        return (
            len(self.token) == TOKEN_BYTES
            and 0 < len(self.metadata) <= MAX_METADATA_BYTES
            and positive
            and 0 <= self.first_slot < 1 << 20
            and self.slots < 1 << 20
            and self.stride <= 1 << 30
            and self.slots_at + self.slots * self.stride < _MAX_MEMORY
            and self.probe + TOKEN_BYTES < _MAX_MEMORY
        )

    def locate(self, slot: int, nbytes: int) -> int:
        """Return where in the mover's memory a slot begins. Raises TransferFailed unless the slot
        is one of those served and has ``nbytes``."""
        index = slot - self.first_slot
        if not (0 <= index < self.slots and 0 < nbytes <= self.stride):
            raise TransferFailed(
                f"{nbytes} bytes of slot {slot}; the other worker serves {self.slots} slots of"
                f" {self.stride} bytes from slot {self.first_slot} on"
            )
        return self.slots_at + index * self.stride


# ---- front -> mover ------------------------------------------------------------------------


class AddPeer(msgspec.Struct, frozen=True, tag=True):
    """Connect to the mover of another worker; it is called ``peer`` from now on."""

    peer: int
    token: bytes
    metadata: bytes
    probe: int


class ForgetPeer(msgspec.Struct, frozen=True, tag=True):
    """Disconnect from a mover. No read from it is under way."""

    peer: int


class Read(msgspec.Struct, frozen=True, tag=True):
    """Read ``nbytes`` at ``remote`` of a peer's memory to ``local`` of the mapped region."""

    read: int
    peer: int
    remote: int
    local: int
    nbytes: int


MoverCommand: TypeAlias = AddPeer | ForgetPeer | Read


# ---- mover -> front ------------------------------------------------------------------------


class MoverReady(msgspec.Struct, frozen=True, tag=True):
    """The region is registered. What others need to read it."""

    token: bytes
    metadata: bytes
    probe: int
    region_at: int  # where in the mover's memory the region begins


class MoverFailed(msgspec.Struct, frozen=True, tag=True):
    """The library could not be loaded or set up; the mover ends."""

    why: str


class MoverBeat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life, every BEAT_S."""


class PeerAdded(msgspec.Struct, frozen=True, tag=True):
    """The peer's memory can be read: its token has been."""

    peer: int


class PeerFailed(msgspec.Struct, frozen=True, tag=True):
    """The peer cannot be reached, or is not the one that was meant. It is forgotten."""

    peer: int
    why: str


class ReadDone(msgspec.Struct, frozen=True, tag=True):
    """All bytes of a read have been written."""

    read: int


class ReadRefused(msgspec.Struct, frozen=True, tag=True):
    """A read did not begin: nothing was written, and nothing will be."""

    read: int
    why: str


class ReadFailed(msgspec.Struct, frozen=True, tag=True):
    """A read broke or is stuck. It may still write, until the mover is killed."""

    read: int
    why: str


MoverEvent: TypeAlias = (
    MoverReady
    | MoverFailed
    | MoverBeat
    | PeerAdded
    | PeerFailed
    | ReadDone
    | ReadRefused
    | ReadFailed
)

_encode = msgspec.msgpack.Encoder().encode
_decode_address = msgspec.msgpack.Decoder(MoverAddress).decode
encode_packet = _encode
decode_command = msgspec.msgpack.Decoder(MoverCommand).decode
decode_event = msgspec.msgpack.Decoder(MoverEvent).decode
