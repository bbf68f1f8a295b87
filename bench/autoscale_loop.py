"""A process that runs the product's autoscaler with a policy of choice:

    python -m bench.autoscale_loop < order.json

until it is terminated. It is a driver of the cluster's Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from cluster import ray_runtime
from cluster.autoscale.loop import Policy
from cluster.autoscale.process import Autoscaler
from cluster.autoscale.replicas import ServeReplicas
from cluster.autoscale.settings import AutoscalerSettings
from cluster.settings import ROLES, Role
from cluster.sizing.decision import Decision
from cluster.sizing.policy import decide
from cluster.sizing.snapshot import Snapshot
from protocol.directory import Directory, RedisError, connect

if TYPE_CHECKING:
    from bench.autoscale_ray import OngoingRequests

PolicyName: TypeAlias = Literal["baton", "ray", "hold"]
READY = "ready"
_NOTE_S = 0.5


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """``policy``: Baton's, Ray's, or to leave all as it is (in advisory mode: at its end those that
    are lent stay so). ``ongoing`` and ``quicker`` are
    those of ``OngoingRequests``."""

    settings: AutoscalerSettings
    run_dir: str
    ray_address: str
    policy: PolicyName
    ongoing: tuple[float, float] = (2.0, 10.0)
    quicker: float = 1.0


def hold(snapshot: Snapshot) -> Decision:
    """Whatever comes, what was asked for stays."""
    return Decision(
        wanted=snapshot.targets,
        targets=snapshot.targets,
        reason="steady",
        text="fixed",
        memory=snapshot.memory,
    )


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    ray_runtime.prepare_again(Path(order.run_dir))
    with ray_runtime.connected(order.ray_address):
        asyncio.run(_serve(order))


async def _serve(order: Order) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    running = asyncio.create_task(_run(order))
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def _run(order: Order) -> None:
    from bench.autoscale_ray import OngoingRequests, Wanted  # Ray reads the environment as it loads

    settings = order.settings
    client = connect(settings.redis_url)
    ray_policy = OngoingRequests(Wanted(*order.ongoing), order.quicker)
    policies: dict[PolicyName, Policy] = {"baton": decide, "ray": ray_policy, "hold": hold}
    autoscaler = Autoscaler(settings, ServeReplicas(), policy=policies[order.policy])
    noting = asyncio.create_task(_note(Directory(client, settings.cluster), ray_policy))
    try:
        await autoscaler.start()
        print(READY, flush=True)
        await autoscaler.serve_forever()
    finally:
        noting.cancel()
        await autoscaler.stop()
        await client.aclose()


async def _note(directory: Directory, policy: OngoingRequests) -> None:
    """What runs and waits in each pool, as its workers say."""
    while True:
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            workers = await directory.workers()
            ongoing: dict[Role, int] = {
                role: sum(w.running + w.waiting for w in workers if w.role == role)
                for role in ROLES
            }
            policy.note(time.monotonic(), ongoing)
        await asyncio.sleep(_NOTE_S)


if __name__ == "__main__":
    main()
