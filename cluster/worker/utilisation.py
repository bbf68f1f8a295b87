"""How far a worker is from its ceilings: what its engine and its links did over the last seconds.

record or scrape --look--> a sample, at most each LOOK_S --> the oldest one of WINDOW_S against now
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from engine.ipc.counters import Counters
from engine.ipc.messages import Ready
from engine.ipc.spec import Ceilings
from engine.kv_cache.kv_format import Codec, KVFormat
from engine.process.client import EngineClient
from kvtransfer.codec_choice import TrafficCounter, Wanted, choose
from protocol.registry.worker_utilisation import Walls

WINDOW_S = 10.0
LOOK_S = 0.5
LEAST_S = 1.0
"""Of the engine's time, before which nothing is said."""


class Sample(NamedTuple):
    """``received``: bytes of KV; ``waited_s``: for them, see ``Tails``."""

    at: float
    counters: Counters
    received: int
    waited_s: float


class Machine(NamedTuple):
    """What does not change while an engine lives. ``link``: bytes per second, 0: not known."""

    ceilings: Ceilings
    link: float
    element_bytes: int
    kv_shrink: float
    wire_shrink: float
    gpu: bool


def machine(ready: Ready, wanted: Wanted, link: float) -> Machine:
    """``wanted``: the codec that is asked for."""
    wire = choose(ready.kv, wanted)
    return Machine(
        ready.ceilings,
        link,
        ready.element_bytes,
        _shrink(ready.kv, ready.kv.stored),
        _shrink(ready.kv, wire),
        ready.gpu,
    )


def _shrink(kv: KVFormat, now: Codec) -> float:
    """What bytes would be divided by in fp8."""
    return max(1.0, kv.page_layer_bytes(now) / kv.page_layer_bytes(Codec.FP8))


def walls(before: Sample, now: Sample, of: Machine, *, drafts: bool) -> Walls | None:
    """What lies between two samples; None where that is too little."""
    was, is_ = before.counters.done, now.counters.done
    seconds = is_.seconds - was.seconds
    if seconds < LEAST_S:
        return None
    busy = now.counters.step_seconds.total - before.counters.step_seconds.total
    weights, kv = is_.weight_bytes - was.weight_bytes, is_.kv_bytes - was.kv_bytes
    rows = now.counters.decode_rows - before.counters.decode_rows
    passed = max(1e-9, now.at - before.at)
    return Walls(
        seconds=seconds,
        busy=_share(busy, seconds),
        compute=_share(is_.flops - was.flops, busy * of.ceilings.flops),
        bandwidth=_share(weights + kv, busy * of.ceilings.bytes),
        capacity=_share(is_.kv_seconds - was.kv_seconds, seconds),
        network=_share(now.received - before.received, passed * of.link),
        starved=_share(is_.starved_seconds - was.starved_seconds, seconds),
        kv_wait=max(0.0, now.waited_s - before.waited_s) / passed,
        batch=rows / max(1, is_.decode_steps - was.decode_steps),
        kv_share=_share(kv, weights + kv),
        element_bytes=of.element_bytes,
        kv_shrink=of.kv_shrink,
        wire_shrink=of.wire_shrink,
        gpu=of.gpu,
        drafts=drafts,
    )


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


class WallWatch:
    """Of one worker. ``link``: bytes per second as declared, 0: the best that was seen."""

    def __init__(
        self,
        engine: EngineClient,
        traffic: TrafficCounter,
        codec: Wanted,
        link: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._traffic = traffic
        self._codec = codec
        self._link = link
        self._clock = clock
        self._samples: deque[Sample] = deque()

    def machine(self) -> Machine | None:
        """None while no engine serves."""
        session = self._engine.current
        ready = session.ready if session is not None else None
        link = self._link or self._traffic.tails.best or 0.0
        return None if ready is None else machine(ready, self._codec, link)

    def now(self) -> Walls | None:
        """Over the last seconds; None where nothing is known yet."""
        of, now = self.machine(), self._look()
        if of is None:
            return None
        return walls(self._samples[0], now, of, drafts=self._engine.speculation().active)

    def _look(self) -> Sample:
        at, samples = self._clock(), self._samples
        traffic = self._traffic
        now = Sample(at, self._engine.counters(), traffic.bytes, traffic.tails.seconds)
        if not samples or at - samples[-1].at >= LOOK_S:
            samples.append(now)
        while len(samples) > 1 and at - samples[1].at >= WINDOW_S:
            samples.popleft()
        return now
