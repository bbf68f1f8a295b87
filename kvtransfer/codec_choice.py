"""Chooses the codec and the size of the frames that a worker asks for when it receives KV; imported
by settings as well."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from engine.ipc.settings import CopyCosts
from engine.kv_cache.kv_format import Codec, KVFormat
from protocol.errors import StartupError

CodecChoice: TypeAlias = Literal["auto", "raw", "fp8"]

FRAME_SECONDS = 2e-3
"""Time of a frame on its link. Shorter frames cost more per byte; of longer ones, the last is
received, checked and written long after the prompt has been computed."""

SMALLEST_FRAME = 256 << 10
"""Bytes. A frame costs tens of microseconds (messages, header, one call per copy) at any size."""


ASSUMED_LINK_BYTES_S = 1.25e9
"""Bytes per second of a link of which nothing is known: Ethernet of 10 Gbit/s."""


LINK_SHARE = 0.5
"""Share of the time of a frame that its slower copy takes at most where the link sets the pace."""


class FrameChoice(NamedTuple):
    """What the receiver of a transfer asks the sender for. No frame exceeds ``frame_bytes``."""

    codec: Codec
    frame_bytes: int


def choose_frames(
    kv_format: KVFormat,
    choice: CodecChoice,
    costs: CopyCosts,
    link_bytes_s: float,
    slot_bytes: int,
) -> FrameChoice:
    """Return the codec and the largest frame for a link of ``link_bytes_s`` bytes per second; the
    caller passes its carrier's default where the rate is unknown.

    A frame takes about FRAME_SECONDS on the link, but it holds at least one layer of one block and
    at most ``slot_bytes``. Raises StartupError for a codec that would round the KV.
    """
    codec = choose_codec(kv_format, choice, costs, link_bytes_s)
    least = max(SMALLEST_FRAME, kv_format.block_layer_bytes(codec))
    return FrameChoice(codec, int(min(slot_bytes, max(least, link_bytes_s * FRAME_SECONDS))))


def choose_codec(
    kv_format: KVFormat, choice: CodecChoice, costs: CopyCosts, link_bytes_s: float
) -> Codec:
    """Return the codec to ask for. ``auto`` is the one with which KV is ready first on a link of
    ``link_bytes_s`` bytes per second; no codec of this choice changes a value.

    Raises StartupError for a codec that would round the KV.
    """
    codecs = {codec.name.lower(): codec for codec in kv_format.codecs}
    if choice == "auto":
        return min(
            codecs.values(),
            key=lambda codec: (
                seconds_per_raw_byte(kv_format, codec, costs, link_bytes_s),
                kv_format.block_layer_bytes(codec),
            ),
        )
    if choice not in codecs:
        raise StartupError(
            f"the codec {choice} would round KV, which has the precision {kv_format.precision}:"
            f" use {' or '.join(['auto', *codecs])}, or the precision fp8"
        )
    return codecs[choice]


def seconds_per_raw_byte(
    kv_format: KVFormat, codec: Codec, costs: CopyCosts, link_bytes_s: float
) -> float:
    """Return the seconds from the computed KV to the pool of the receiver, per byte of raw KV: copy
    into a frame, link, and copy out of it.

    The receiver knows its own ``costs`` alone and assumes that the sender's machine is like its
    own. The parts are added although those of different frames overlap: that is exact for the last
    frame, which the request waits for, and for copies that share their cores with the link.
    """
    assert link_bytes_s > 0
    return sum(_copy_costs(codec, costs)) + _size_of(kv_format, codec) / link_bytes_s


def measures_link(kv_format: KVFormat, codec: Codec, costs: CopyCosts, wire_bytes_s: float) -> bool:
    """Return whether frames that arrived with ``wire_bytes_s`` bytes per second show the link's own
    rate. False for fp8 that arrived about as fast as one end can encode or decode it: taken for
    the rate of the link, it would keep ``auto`` at fp8 on a link where raw KV is ready first."""
    if codec is Codec.RAW:
        return True
    copied_s = max(_copy_costs(codec, costs)) / _size_of(kv_format, codec)  # per byte of a frame
    return copied_s * wire_bytes_s < LINK_SHARE


def _copy_costs(codec: Codec, costs: CopyCosts) -> tuple[float, float]:
    if codec is Codec.FP8:
        return costs.read_fp8, costs.write_fp8
    return costs.read_raw, costs.write_raw


def _size_of(kv_format: KVFormat, codec: Codec) -> float:
    """Return the bytes of a frame per byte of raw KV."""
    return kv_format.block_layer_bytes(codec) / kv_format.block_layer_bytes(Codec.RAW)
