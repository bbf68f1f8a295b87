"""KV on its way from P to D.

It goes as it is computed, from when there is room for it at D; what is left when the first token is
out, the last chunk at least, takes its time over the link.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.simulator.devices.clock import Clock
from cluster.simulator.devices.job import Job
from cluster.simulator.devices.network import Network
from cluster.simulator.devices.routing import Router
from protocol.wire import wire_pb2 as pb
from router.placement.learned import LEAST_TAIL_S

SLICE_S = 1.0
"""A transfer that takes longer looks again how much of the link it has."""


class Carrier:
    """``received`` is told when all of a job's KV is at D."""

    def __init__(
        self, clock: Clock, router: Router, network: Network, received: Callable[[Job], None]
    ) -> None:
        self._clock = clock
        self._router = router
        self._network = network
        self._received = received

    def open(self, job: Job) -> None:
        """There is room at D."""
        assert job.p is not None and job.d is not None
        self._network.open(job.p.number, job.d.number)
        if job.computed_s is not None:
            self._carry(job)

    def computed(self, job: Job) -> None:
        """The first token is out, and is not the last."""
        assert job.p is not None and job.d is not None
        self._network.receiving((job.p.name, job.d.name), 1)
        if job.reserved_s is not None:
            self._carry(job)

    def give_up(self, job: Job) -> None:
        """Let go of the link, however far it is."""
        assert job.p is not None and job.d is not None
        if job.reserved_s is not None:
            self._network.close(job.p.number, job.d.number)
        if job.computed_s is not None and job.left > 1:
            self._network.receiving((job.p.name, job.d.name), -1)

    def _carry(self, job: Job) -> None:
        """What has not come yet, from when there is room for it and the prompt is computed."""
        assert job.reserved_s is not None and job.computed_s is not None
        per_token = self._router.terms.kv_bytes
        missing = job.context - job.kv_cached
        ahead = max(0, missing - job.tail) * per_token  # may go before the first token
        sent = min(ahead, self._rate(job) * max(0.0, job.computed_s - job.reserved_s))
        left = missing * per_token - sent
        self._carry_on(job, job.attempt, left, left, self._clock.now)

    def _carry_on(self, job: Job, attempt: int, tail: float, left: float, since_s: float) -> None:
        """``left`` bytes of ``tail``; the link's share is taken anew every SLICE_S."""
        if job.attempt != attempt:
            return
        now, rate = self._clock.now, self._rate(job)
        if left > rate * SLICE_S:
            rest = left - rate * SLICE_S
            self._clock.at(now + SLICE_S, self._carry_on, job, attempt, tail, rest, since_s)
        else:
            ends = now + left / rate
            self._clock.at(ends, self._arrived, job, attempt, tail, ends - since_s)

    def _rate(self, job: Job) -> float:
        assert job.p is not None and job.d is not None
        return self._network.rate(job.p.number, job.d.number)

    def _arrived(self, job: Job, attempt: int, tail: float, seconds: float) -> None:
        if job.attempt != attempt:
            return
        self.give_up(job)
        assert job.p is not None and job.d is not None
        if seconds > LEAST_TAIL_S:
            measured = pb.Measured(
                prefill_instance=job.p.name, tail_bytes=int(tail), tail_seconds=seconds
            )
            self._router.learned.handed_over(job.d.name, measured)
        self._received(job)
