"""KV on its way between workers: of a request from P to D, and of a cached prefix from a peer.

KV is sent while it is computed, from when the decode worker has room for it. The decode worker asks
its pool for room when the product's would (protocol/page_reservation.py). What is left when the
first token exists, the last chunk at least, then takes its time over the link.

A worker that fetches a prefix does so before it computes the rest. A fetch ends early where the
source dies or the limit of ``kvtransfer/peer_fetch.py`` is reached; what has come by then is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.network import SimulatedNetwork
from cluster.simulator.devices.request import SimulatedRequest
from cluster.simulator.devices.worker import SimulatedWorker
from protocol.block_keys import BLOCK_TOKENS
from protocol.page_reservation import reservation_delay_s, reserves_at_start
from protocol.wire import wire_pb2 as pb
from router.placement.cost import usable_tokens
from router.placement.estimates import MIN_TAIL_S
from router.placement.snapshot import PrefixFetch

RESERVE_S = 0.05
"""Expected seconds of a reservation: one step of a decode worker."""

FETCH_S = 20.0
"""Limit of a fetch, as in ``kvtransfer/peer_fetch.py``."""


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
        now = self._clock.now
        if left:
            after_s, sent = self._network.next_slice(*_link(request), left)
            self._clock.at(now + after_s, self._send, request, attempt, tail, left - sent, since_s)
            return
        self.close(request)
        assert request.prefill is not None and request.decode is not None
        if (seconds := now - since_s) > MIN_TAIL_S:
            measured = pb.Measured(
                prefill_instance=request.prefill.name, tail_bytes=int(tail), tail_seconds=seconds
            )
            request.router.estimates.record_transfer(request.decode.name, measured)
        self._on_received(request)


@dataclass(slots=True)
class FetchTransfer:
    """A fetch of the first ``tokens`` of a request's context."""

    request: SimulatedRequest
    attempt: int
    worker: SimulatedWorker
    source: SimulatedWorker
    tokens: int
    until_s: float
    left: float = 0.0  # bytes

    @property
    def link(self) -> tuple[int, int]:
        return self.source.number, self.worker.number

    @property
    def is_over(self) -> bool:
        """Whether the request has gone elsewhere."""
        return self.request.attempt != self.attempt


class PrefixFetcher:
    """All fetches of a simulation."""

    def __init__(self, clock: SimulatedClock, network: SimulatedNetwork) -> None:
        self._clock = clock
        self._network = network

    def fetch(
        self,
        request: SimulatedRequest,
        worker: SimulatedWorker,
        source: SimulatedWorker,
        fetch: PrefixFetch,
    ) -> None:
        """Bring a prefix to ``worker``, and submit the request to it then."""
        now = self._clock.now
        of = FetchTransfer(request, request.attempt, worker, source, fetch.tokens, now + FETCH_S)
        self._clock.at(now + fetch.wait_s, self._look_up, of)

    def _look_up(self, of: FetchTransfer) -> None:
        if of.is_over:
            return
        request, source = of.request, of.source
        held = usable_tokens(of.worker.cache.cached_tokens(request.blocks), request.context)
        found = 0 if source.state == "gone" else source.cache.cached_tokens(request.blocks)
        of.tokens = min(of.tokens, found)
        if of.tokens <= held:
            of.worker.submit(request)
            return
        of.left = (of.tokens - held) * request.router.terms.kv_bytes
        self._network.open(*of.link)
        self._send(of)

    def _send(self, of: FetchTransfer) -> None:
        """Send the bytes that are left at the current share of the link."""
        is_lost = of.source.state == "gone" or self._clock.now >= of.until_s
        if of.is_over or is_lost or not of.left:
            self._end(of)
            return
        after_s, sent = self._network.next_slice(*of.link, of.left)
        of.left -= sent
        self._clock.at(self._clock.now + after_s, self._send, of)

    def _end(self, of: FetchTransfer) -> None:
        self._network.close(*of.link)
        if of.is_over:
            return
        missing = of.left / of.request.router.terms.kv_bytes
        of.request.fetched = int(of.tokens - missing) // BLOCK_TOKENS * BLOCK_TOKENS
        of.worker.submit(of.request)


def _link(request: SimulatedRequest) -> tuple[int, int]:
    """Return the numbers of the two workers."""
    assert request.prefill is not None and request.decode is not None
    return request.prefill.number, request.decode.number
