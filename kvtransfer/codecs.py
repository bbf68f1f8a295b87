"""Which codec a transfer uses, and what it puts on the wire."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from engine.counters import Tally
from engine.kv_format import Codec, KVFormat
from engine.pieces import Piece
from kvtransfer.frames import HEADER_BYTES
from kvtransfer.tails import Tails
from protocol.errors import StartupError

Wanted: TypeAlias = Literal["auto", "raw", "fp8"]

TRANSFER_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


def choose(format_: KVFormat, wanted: Wanted) -> Codec:
    """The codec to ask for. ``auto``: the one with the fewest bytes that changes no value. Raises
    StartupError for one that would."""
    codecs = {codec.name.lower(): codec for codec in format_.codecs}
    if wanted == "auto":
        return min(codecs.values(), key=format_.page_layer_bytes)
    if wanted not in codecs:
        raise StartupError(
            f"the codec {wanted} would round KV, which has the precision {format_.precision}:"
            f" use {' or '.join(['auto', *codecs])}, or the precision fp8"
        )
    return codecs[wanted]


@dataclass
class Traffic:
    """What has come in by one codec, headers included, and what it would have been raw.
    ``seconds``: of whole transfers, over TRANSFER_SECONDS."""

    frames: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    failures: int = 0
    seconds: Tally = field(default_factory=lambda: Tally.over(TRANSFER_SECONDS))


@dataclass
class TrafficCounter:
    """By codec. Event loop only."""

    by_codec: dict[Codec, Traffic] = field(default_factory=dict)
    tails: Tails = field(default_factory=Tails)

    @property
    def bytes(self) -> int:
        """That have come in, headers included."""
        return sum(traffic.bytes for traffic in self.by_codec.values())

    def count(self, format_: KVFormat, codec: Codec, piece: Piece, nbytes: int) -> None:
        """One frame with ``nbytes`` of payload."""
        traffic = self._of(codec)
        traffic.frames += 1
        traffic.bytes += HEADER_BYTES + nbytes
        traffic.raw_bytes += HEADER_BYTES + piece.bytes(format_.page_layer_bytes(Codec.RAW))

    def ended(self, codec: Codec, seconds: float) -> None:
        """A transfer has come whole."""
        self._of(codec).seconds.add(seconds, TRANSFER_SECONDS)

    def failed(self, codec: Codec) -> None:
        """A transfer broke, or brought what must not be believed."""
        self._of(codec).failures += 1

    def _of(self, codec: Codec) -> Traffic:
        return self.by_codec.setdefault(codec, Traffic())
