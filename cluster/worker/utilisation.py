"""The utilisation of a worker: what its engine and its links did over the last seconds, relative to
the ceilings of the machine.

record or scrape --> a sample, at most one each SAMPLE_S --> the oldest of WINDOW_S against now
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from engine.ipc.counters import EngineCounters
from engine.ipc.messages import EngineReady
from engine.ipc.settings import MachineCeilings
from engine.kv_cache.kv_format import Codec, KVFormat
from engine.process.client import EngineClient
from kvtransfer.codec_choice import ASSUMED_LINK_BYTES_S, CodecChoice, choose_codec
from kvtransfer.traffic import TrafficCounter
from protocol.registry.directory import WorkerUtilisation

WINDOW_S = 10.0
SAMPLE_S = 0.5
MIN_WINDOW_S = 1.0
"""Engine time that a window must cover before its utilisation is known."""


class UtilisationSample(NamedTuple):
    """Counters at one time. ``received``: bytes of KV; ``waited_s``: seconds of waiting for KV."""

    at: float
    counters: EngineCounters
    received: int
    waited_s: float


class WorkerLimits(NamedTuple):
    """Limits of a machine, constant for an engine process. ``link``: bytes per second, 0: unknown.

    ``kv_shrink`` and ``wire_shrink`` are the factors that fp8 would save in the pool and in
    transfers."""

    ceilings: MachineCeilings
    link: float
    element_bytes: int
    kv_shrink: float
    wire_shrink: float
    gpu: bool


def worker_limits(ready: EngineReady, wanted: CodecChoice, link: float) -> WorkerLimits:
    """Return the limits of the machine of an engine that pulls KV with the codec ``wanted``."""
    wire = choose_codec(ready.kv, wanted, ready.copy_costs, link or ASSUMED_LINK_BYTES_S)
    return WorkerLimits(
        ready.ceilings,
        link,
        ready.element_bytes,
        _shrink(ready.kv, ready.kv.stored),
        _shrink(ready.kv, wire),
        ready.gpu,
    )


def _shrink(kv: KVFormat, now: Codec) -> float:
    """Return the factor by which fp8 would divide the bytes."""
    return max(1.0, kv.block_layer_bytes(now) / kv.block_layer_bytes(Codec.FP8))


def compute_utilisation(
    before: UtilisationSample, now: UtilisationSample, of: WorkerLimits, *, drafts: bool
) -> WorkerUtilisation | None:
    """Return the utilisation between two samples; None when they are too close together."""
    was, is_ = before.counters.done, now.counters.done
    seconds = is_.seconds - was.seconds
    if seconds < MIN_WINDOW_S:
        return None
    busy = now.counters.step_seconds.total - before.counters.step_seconds.total
    weights, kv = is_.weight_bytes - was.weight_bytes, is_.kv_bytes - was.kv_bytes
    rows = now.counters.decode_rows - before.counters.decode_rows
    passed = max(1e-9, now.at - before.at)
    return WorkerUtilisation(
        seconds=seconds,
        busy=_share(busy, seconds),
        prompt_tokens_s=(now.counters.prefill_tokens - before.counters.prefill_tokens) / seconds,
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


class UtilisationMonitor:
    """Samples one worker. ``link``: bytes per second as declared; 0 means the best rate seen."""

    def __init__(
        self,
        engine: EngineClient,
        traffic: TrafficCounter,
        codec: CodecChoice,
        link: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._traffic = traffic
        self._codec = codec
        self._link = link
        self._clock = clock
        self._samples: deque[UtilisationSample] = deque()

    def machine(self) -> WorkerLimits | None:
        """Return the limits of the machine; None while no engine serves."""
        session = self._engine.current
        ready = session.ready if session is not None else None
        link = self._link or self._traffic.kv_wait.best_bytes_per_s or 0.0
        return None if ready is None else worker_limits(ready, self._codec, link)

    def current(self) -> WorkerUtilisation | None:
        """Return the utilisation over the last seconds; None when it is not known yet."""
        of, now = self.machine(), self._take_sample()
        if of is None:
            return None
        return compute_utilisation(
            self._samples[0], now, of, drafts=self._engine.speculation().active
        )

    def _take_sample(self) -> UtilisationSample:
        at, samples = self._clock(), self._samples
        traffic = self._traffic
        now = UtilisationSample(
            at, self._engine.counters(), traffic.bytes, traffic.kv_wait.waited_s
        )
        if not samples or at - samples[-1].at >= SAMPLE_S:
            samples.append(now)
        while len(samples) > 1 and at - samples[1].at >= WINDOW_S:
            samples.popleft()
        return now
