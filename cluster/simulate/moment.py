"""How a simulated cluster stands at one moment."""

from __future__ import annotations

import msgspec


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """How things stood. Workers that serve, by role; ``starting`` those that were asked for;
    shares of ``busy`` time since the last one."""

    at_s: float
    prefill: int
    decode: int
    starting: int
    leaving: int
    queued: int  # requests whose prompt is not computed
    decoding: int
    busy_prefill: float
    busy_decode: float
    kv_share: float  # of the decode workers' pools
