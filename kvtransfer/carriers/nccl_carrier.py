"""The carrier ``nccl``: the engines send KV to each other through a collective library.

The library is gloo, between slots in main memory. The code is made for NCCL between GPUs as well,
which needs slots in staging memory of the device. Those do not exist yet, so the carrier refuses
NCCL. Neither library encrypts or authenticates. So it is offered only where the network between
workers is trusted (``kv.fabric``).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from engine.ipc.pair_messages import PairEvent
from engine.process.session import EngineSession
from kvtransfer.carrier import InboundRequest
from kvtransfer.pairs.inbound_pairs import InboundPairs
from kvtransfer.pairs.outbound_pairs import OutboundPairs
from kvtransfer.pairs.pair_links import PairInboundLink, PairOutboundLink
from protocol.errors import CarrierFailed, StartupError
from protocol.wire import wire_pb2 as pb

_CHECK_THREADS = 2

_IDENTITY = re.compile(r"gloo/[0-9a-f]{32}")
"""A worker or an engine, with its backend: both ends need the same."""


class _SessionPairs:
    """The pairs of one engine session, in both directions."""

    def __init__(self, session: EngineSession, host: str) -> None:
        self.session = session
        self.identity = _draw_identity()
        self.inbound = InboundPairs(session, host)
        self.outbound = OutboundPairs(session, host)
        session.on_pair_event = self._on_event

    def _on_event(self, event: PairEvent) -> None:
        if self.inbound.knows(event.pair):
            self.inbound.on_event(event)
        elif self.outbound.knows(event.pair):
            self.outbound.on_event(event)


class NcclCarrier:
    """Both ends of one worker. The engine sends or receives by pairs, never both at a time
    (``engine/collectives/collective_thread.py``): while one direction has transfers, the other one
    goes by another carrier."""

    name = "nccl"
    needs_slots = True

    def __init__(self, trusted: bool, backend: str = "gloo") -> None:
        if backend != "gloo":
            raise StartupError(f"the carrier nccl works with gloo only, not with {backend!r}")
        self._identity = _draw_identity()  # of this worker, as a receiver
        self._trusted = trusted
        self._host = ""
        self._pairs: _SessionPairs | None = None
        self._checks = ThreadPoolExecutor(_CHECK_THREADS, thread_name_prefix="nccl-check")

    async def start(self, host: str) -> None:
        """Nothing is started before a pair is opened."""
        self._host = host

    async def close(self) -> None:
        self._checks.shutdown(wait=False, cancel_futures=True)

    def _of(self, session: EngineSession) -> _SessionPairs:
        if self._pairs is None or self._pairs.session is not session:
            self._pairs = _SessionPairs(session, self._host)
        return self._pairs

    # ---- the receiving end ------------------------------------------------------------------

    def offer(self, endpoint: str) -> str | None:
        sends = self._pairs is not None and self._pairs.outbound.links > 0
        return self._identity if self._trusted and not sends else None

    def connect(self, request: InboundRequest) -> PairInboundLink:
        link = PairInboundLink(request, self._of(request.session).inbound, self._checks)
        if _IDENTITY.fullmatch(request.address) is None:
            link.fail(CarrierFailed(f"nccl: no engine is called {request.address[:80]!r}"))
        return link

    # ---- the sending end --------------------------------------------------------------------

    def accept(self, offer: pb.CarrierOffer, session: EngineSession) -> str | None:
        pairs = self._of(session)
        known = _IDENTITY.fullmatch(offer.address) is not None
        if not self._trusted or not known or pairs.inbound.links > 0:
            return None
        return pairs.identity

    def open(
        self,
        transfer: bytes,
        offer: pb.CarrierOffer,
        session: EngineSession,
        say: Callable[[pb.PrefillEvent], None],
    ) -> PairOutboundLink:
        return PairOutboundLink(offer.address, self._of(session).outbound, say)


def _draw_identity() -> str:
    return f"gloo/{secrets.token_hex(16)}"
