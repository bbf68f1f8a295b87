"""An engine process whose steps last as long as a declared device's, for `worker.engine`.

    BATON_BENCH_PACED='{"coefficients": [0.03, 3e-3, 2e-6, 1e-3, 0], "tallies": "/tmp/tallies"}' \\
        baton worker --role decode --worker-engine bench.lib.paced_engine

It is the product's engine process except for the timer of its steps and for its priority: on a
small machine an engine that loads its weights would make the others late, so that it runs at a
lower priority. Loading is not paced. The warm-up runs a second time, unpaced, and teaches the
engine's model of step times the declared times.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from bench.lib.paced import Device, PacedTimer, declared, open_lateness_file
from cluster.worker import engine_main
from engine.execution import loading
from engine.execution.engine import Engine
from engine.execution.loading import LoadedEngine
from engine.execution.warm_up import warm_up
from engine.ipc.settings import EngineSettings
from engine.scheduling.step_policy import StepPolicy
from protocol.performance.step_model import StepWork

LOADING, SERVING = 15, -5
"""Nice values of an engine that loads and of one that serves."""


def main() -> None:
    device, load = declared(), loading.load_engine
    may = _be(SERVING) and _be(LOADING)

    def paced(
        settings: EngineSettings, policy: StepPolicy, progress: Callable[[str, float], None]
    ) -> LoadedEngine:
        loaded = load(settings, policy, progress)
        pace(loaded.engine, device)
        if may:
            _be(SERVING)
        chunk = loaded.engine.config.prefill_chunk
        longest = device.step_time.seconds(StepWork(0, 0, chunk, chunk**2 / 2))
        ready = msgspec.structs.replace(loaded.ready, step_seconds=longest)
        return dataclasses.replace(loaded, ready=ready)

    loading.load_engine = paced
    engine_main.main()


def _be(nice: int) -> bool:
    """Set the nice value, and return whether that is permitted."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError:
        return False
    return True


def pace(engine: Engine, device: Device) -> None:
    """Make ``engine`` take the declared time per step from now on, and learn it."""
    now = 0.0

    def pass_(seconds: float) -> None:
        nonlocal now
        now += seconds

    coefficients = device.step_time
    _set_timer(
        engine,
        PacedTimer(engine.step_time, coefficients, lambda *_: None, lambda: now, pass_),
    )
    warm_up(engine)
    lateness_file = open_lateness_file(Path(device.tallies))
    _set_timer(
        engine,
        PacedTimer(
            engine.step_time, coefficients, lateness_file.step, time.perf_counter, time.sleep
        ),
    )


def _set_timer(engine: Engine, timer: PacedTimer) -> None:
    engine._timer = engine._stepper._timer = timer


if __name__ == "__main__":
    main()
