"""The cost of monitoring: counting the work of a step, and serving `/ui`.

    python -m bench.watching [--workers N]

The cost of counting is the time that it adds to a step of the demo model at batches of 1 and 32.
The cost of `/ui` is the CPU time per second of the router while a client asks for `/ui/overview` as
the page does, less that without a client; workers are idle, without Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

from bench.lib.bare_engine import bare_engine
from bench.lib.report import ResultRow, finish
from bench.lib.standalone import Standalone
from cluster.models.locate import demo_path
from engine.execution.engine import Engine
from engine.execution.pass_cost import pass_cost
from engine.ipc.counters import WorkDone
from engine.scheduling.step_policy import StepPlan
from protocol.requests import Request
from protocol.sampling_params import SamplingParams

COUNTS = 20_000
STEPS = 100
PAGE_ASKS_S = 2.0
WATCHED_S = 20.0


def decoding(engine: Engine, batch: int) -> StepPlan:
    """Return a step in which ``batch`` sequences decode."""
    sampling = SamplingParams(temperature=0.0, max_tokens=4 * STEPS, ignore_eos=True)
    for handle in range(batch):
        prompt = tuple(range(3 + handle, 67 + handle))
        request = Request(id=str(handle), prompt=prompt, sampling=sampling, cache_root=bytes(16))
        engine.generate(handle, request)
    while len((plan := engine.plan()).decode) < batch or plan.chunks:
        engine.run(plan)
    return plan


def counting(batch: int) -> ResultRow:
    engine = bare_engine(demo_path())
    plan = decoding(engine, batch)
    model = engine.model
    cost = pass_cost(model.config, engine.format, model.weights.bytes, model.dtype.itemsize)
    done = WorkDone()
    began = time.perf_counter()
    for _ in range(COUNTS):
        cost.add(done, plan, plan.work, batch)
    each = (time.perf_counter() - began) / COUNTS
    engine.run(plan)
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.run(engine.plan())
    step = (time.perf_counter() - began) / STEPS
    of = f"{100 * each / step:.2f}% of a step of {step * 1e3:.2f} ms"
    return ResultRow(f"counting, batch {batch}", each * 1e6, "us", of)


async def looking(workers: int) -> ResultRow:
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        roles = ["prefill"] * (workers // 2) + ["decode"] * (workers - workers // 2)
        small = ("--threads", "1", "--kv-tokens", "4096", "--speculation", "off")
        pool = Standalone(Path(folder), roles, small)
        try:
            await pool.start()
            router = psutil.Process(pool.routers[0].pid)
            async with aiohttp.ClientSession() as session:
                idle = await _cpu(router, None, "")
                watched = await _cpu(router, session, f"{pool.url}/ui/overview")
        finally:
            await pool.close()
    return ResultRow(f"/ui, {workers} workers", 1e3 * (watched - idle), "ms/s")


async def _cpu(router: psutil.Process, session: aiohttp.ClientSession | None, url: str) -> float:
    """Return the router's CPU seconds per second."""
    before, began = router.cpu_times(), time.perf_counter()
    while time.perf_counter() - began < WATCHED_S:
        if session is not None:
            async with session.get(url) as reply:
                assert reply.status == 200, await reply.text()
        await asyncio.sleep(PAGE_ASKS_S)
    after, took = router.cpu_times(), time.perf_counter() - began
    return (after.user + after.system - before.user - before.system) / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    workers = parser.parse_args().workers
    rows = [counting(1), counting(32), asyncio.run(looking(workers))]
    finish("watching", rows)


if __name__ == "__main__":
    main()
