"""The transfer of a request's KV from its prefill worker to its decode worker.

KV is sent while it is computed, from when the decode worker has room for it. The decode worker asks
its pool for room when the product's would (protocol/page_reservation.py). What is left when the
first token exists, the last chunk at least, then takes its time over the link.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.network import SimulatedNetwork
from cluster.simulator.devices.request import SimulatedRequest
from protocol.page_reservation import reservation_delay_s, reserves_at_start
from protocol.wire import wire_pb2 as pb
from router.placement.estimates import MIN_TAIL_S

RESERVE_S = 0.05
"""Expected seconds of a reservation: one step of a decode worker."""

SLICE_S = 1.0
"""Seconds after which a long transfer computes its share of the link anew."""


class KvCarrier:
    """Moves KV over the simulated network; calls ``on_received`` when all of it is at D."""

    def __init__(
        self,
        clock: SimulatedClock,
        network: SimulatedNetwork,
        on_received: Callable[[SimulatedRequest], None],
    ) -> None:
        self._clock = clock
        self._network = network
        self._on_received = on_received

    def reservation_delay_s(self, request: SimulatedRequest) -> float:
        """Return how many seconds after the start of its prefill the request asks for room at its
        decode worker: the product's decision after each chunk, whose end is known here."""
        worker, first = request.prefill, request.cached
        assert worker is not None
        chunk, tokens = worker.machine.chunk, request.context - first
        whole_s = worker.model.prefill_s(first, tokens, chunk)
        if reserves_at_start(tokens, chunk):
            return 0.0
        kv_bytes = (request.context - request.kv_cached) * request.router.terms.kv_bytes
        rate, asks_s = self._network.rate(*_link(request)), whole_s
        for computed in range(chunk, tokens, chunk):
            at = worker.model.prefill_s(first, computed, chunk)
            if at >= asks_s:
                break
            asks_s = at + reservation_delay_s(
                tokens=tokens, computed=computed, elapsed_s=at, kv_bytes=kv_bytes,
                link_bytes_s=rate, reserve_s=RESERVE_S,
            )  # fmt: skip
        return min(asks_s, whole_s)

    def open(self, request: SimulatedRequest) -> None:
        """Open the transfer when the decode worker has room."""
        self._network.open(*_link(request))
        if request.computed_s is not None:
            self._send_rest(request)

    def prompt_computed(self, request: SimulatedRequest) -> None:
        """Send the rest once the first token exists, which is not the last."""
        if request.reserved_s is not None:
            self._send_rest(request)

    def close(self, request: SimulatedRequest) -> None:
        """Release the link, whatever has been sent."""
        if request.reserved_s is not None:
            self._network.close(*_link(request))

    def _send_rest(self, request: SimulatedRequest) -> None:
        assert request.reserved_s is not None and request.computed_s is not None
        per_token = request.router.terms.kv_bytes
        missing = request.context - request.kv_cached
        early = max(0, missing - request.tail) * per_token  # may go before the first token
        rate = self._network.rate(*_link(request))
        sent = min(early, rate * max(0.0, request.computed_s - request.reserved_s))
        left = missing * per_token - sent
        self._send(request, request.attempt, left, left, self._clock.now)

    def _send(
        self, request: SimulatedRequest, attempt: int, tail: float, left: float, since_s: float
    ) -> None:
        """Send the last ``left`` of ``tail`` bytes at the current share of the link."""
        if request.attempt != attempt:
            return
        now, rate = self._clock.now, self._network.rate(*_link(request))
        if left > rate * SLICE_S:
            rest = left - rate * SLICE_S
            self._clock.at(now + SLICE_S, self._send, request, attempt, tail, rest, since_s)
        else:
            ends = now + left / rate
            self._clock.at(ends, self._arrived, request, attempt, tail, ends - since_s)

    def _arrived(
        self, request: SimulatedRequest, attempt: int, tail: float, seconds: float
    ) -> None:
        if request.attempt != attempt:
            return
        self.close(request)
        assert request.prefill is not None and request.decode is not None
        if seconds > MIN_TAIL_S:
            measured = pb.Measured(
                prefill_instance=request.prefill.name, tail_bytes=int(tail), tail_seconds=seconds
            )
            request.router.estimates.record_transfer(request.decode.name, measured)
        self._on_received(request)


def _link(request: SimulatedRequest) -> tuple[int, int]:
    """Return the numbers of the two workers."""
    assert request.prefill is not None and request.decode is not None
    return request.prefill.number, request.decode.number
