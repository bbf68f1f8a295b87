"""One contestant: its cluster made ready, the sequence of phases sent, and what became of it."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from bench.autoscale_figures import Look
from bench.autoscale_looks import Took, looks, read, took
from bench.autoscale_loop import READY, Order, PolicyName
from bench.mooncake import Arrival
from bench.open_loop import Answer, open_loop
from bench.paced import Lateness
from bench.paced_cluster import PacedCluster
from cluster.autoscale.mode import Mode
from cluster.autoscale.settings import AutoscalerSettings

_START_S, _STOP_S = 30.0, 20.0
_WHOLE_S = 90.0


class Contestant(NamedTuple):
    """``split``: workers of each role at the start, and to the end under the policy `hold`."""

    name: str
    policy: PolicyName
    split: tuple[int, int]
    ongoing: tuple[float, float] = (2.0, 10.0)


class Run(NamedTuple):
    """``log``: of the decisions."""

    contestant: Contestant
    answers: list[Answer]
    looks: list[Look]
    took: Took
    late: Lateness
    log: Path


async def contest(
    cluster: PacedCluster,
    contestant: Contestant,
    settings: AutoscalerSettings,
    arrivals: Sequence[Arrival],
    quicker: float,
) -> Run:
    """Raises RuntimeError when the loop does not start."""
    await arrange(cluster, contestant)
    log = cluster.folder / f"{secrets.token_hex(4)}.jsonl"
    mode: Mode = "advise" if contestant.policy == "hold" else "act"
    before = cluster.lateness()
    order = Order(
        settings=replace(settings, log=str(log), mode=mode),
        run_dir=cluster.local.state.run_dir,
        ray_address=cluster.local.state.ray_address or "",
        policy=contestant.policy,
        ongoing=contestant.ongoing,
        quicker=quicker,
    )
    async with _loop(order):
        began = time.monotonic()
        answers = await open_loop(cluster.url, arrivals, secrets.token_hex(8))
    records = read(log)
    late = cluster.lateness().since(before)
    return Run(contestant, answers, looks(records, began), took(records), late, log)


@asynccontextmanager
async def _loop(order: Order) -> AsyncIterator[None]:
    """Runs within it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.autoscale_loop"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(order))
        process.stdin.close()
        async with asyncio.timeout(_START_S):
            line = await process.stdout.readline()
        if line.decode().strip() != READY:
            raise RuntimeError(f"the loop of {order.policy} did not start")
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def arrange(cluster: PacedCluster, contestant: Contestant) -> None:
    """Have as many workers of each role as the contestant begins with, and nothing under way.
    Where the split stays, those that there are lend themselves, and only what is missing then is
    started. Raises TimeoutError, Unavailable."""
    prefill, decode = contestant.split
    workers = await cluster.workers()
    if contestant.policy != "hold":
        for worker in [w for w in workers if w.lent]:
            await cluster.lend(worker, worker.home, 0.0)
    if contestant.policy != "hold" or len(workers) != prefill + decode:
        await asyncio.to_thread(cluster.scale, prefill, decode)
    async with asyncio.timeout(_WHOLE_S):
        while len(await cluster.workers()) != prefill + decode:
            await asyncio.sleep(0.2)
        await _lend_until(cluster, prefill)
        while any(w.running or w.waiting for w in await cluster.workers()):
            await asyncio.sleep(0.2)


async def _lend_until(cluster: PacedCluster, prefill: int) -> None:
    """Roles, so that ``prefill`` of the workers that are there have that one."""
    workers = await cluster.workers()
    have = [w for w in workers if w.role == "prefill"]
    others = [w for w in workers if w.role != "prefill"]
    for worker in have[prefill:]:
        await cluster.lend(worker, "decode", 0.0)
    for worker in others[: max(0, prefill - len(have))]:
        await cluster.lend(worker, "prefill", 0.0)
