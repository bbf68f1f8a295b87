"""The carrier ``nixl``: D reads P's slots through NIXL, over RDMA.

It is offered only where the library is installed, the host has an RDMA device (over TCP the carrier
``tcp`` is faster), and the network between workers is trusted (``kv.fabric``): the library neither
encrypts nor authenticates, UCX below it accepts connections from anyone, and metadata of other
agents are read without a check. ``kvtransfer.nixl`` says how it is kept in processes of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.process.session import EngineSession
from kvtransfer.carrier import InboundRequest
from kvtransfer.carriers.nixl_links import NixlInboundLink
from kvtransfer.carriers.slot_outbound import SlotOutboundLink
from kvtransfer.nixl.mover_keeper import MoverKeeper
from kvtransfer.nixl.mover_process import inbound_region, outbound_region
from kvtransfer.nixl.package import NixlPackage, is_of_use
from protocol.security.listen_hosts import is_loopback
from protocol.wire import wire_pb2 as pb

_CHECK_THREADS = 2

MOVER_MODULE = "kvtransfer.nixl.mover"


class NixlCarrier:
    """Both ends of NIXL of one worker."""

    name = "nixl"
    needs_slots = True

    def __init__(self, package: NixlPackage | None, trusted: bool, command: Sequence[str]) -> None:
        """``package`` None: not installed. ``command`` runs MOVER_MODULE in a process that dies
        with this one; the carrier adds arguments."""
        self._env = dict(os.environ)
        useful = package is not None and trusted and is_of_use(self._env)
        self._version = package.version if useful and package is not None else None
        self._env["CUDA_VISIBLE_DEVICES"] = ""  # slots are host memory: take nothing of a GPU
        argv = [*command, package.module if package is not None else ""]
        self._reader = MoverKeeper(argv, inbound_region, self._env)
        self._server = MoverKeeper(argv, outbound_region, self._env)
        self._checks = ThreadPoolExecutor(_CHECK_THREADS, thread_name_prefix="nixl-check")

    async def start(self, host: str) -> None:
        """Nothing is started before it is needed: movers register an engine's arena."""
        if is_loopback(host):
            # UCX would accept connections on every interface.
            self._env.setdefault("UCX_NET_DEVICES", "lo")

    async def close(self) -> None:
        await self._reader.close()
        await self._server.close()
        self._checks.shutdown(wait=False, cancel_futures=True)

    # ---- the receiving end ------------------------------------------------------------------

    def offer(self, endpoint: str) -> str | None:
        return self._version if self._reader.may_serve() else None

    def connect(self, request: InboundRequest) -> NixlInboundLink:
        return NixlInboundLink(request, self._reader, self._checks)

    # ---- the sending end --------------------------------------------------------------------

    def accept(self, offer: pb.CarrierOffer, session: EngineSession) -> str | None:
        """Agents of different versions do not understand each other's metadata. While the mover
        still starts, another carrier has to do."""
        if self._version is None or offer.address != self._version:
            return None
        mover = self._server.ready(session)
        return mover.address().encode() if mover is not None else None

    def open(
        self,
        transfer: bytes,
        offer: pb.CarrierOffer,
        session: EngineSession,
        say: Callable[[pb.PrefillEvent], None],
    ) -> SlotOutboundLink:
        return SlotOutboundLink(say)
