"""Creates the carriers of a worker, best first."""

from __future__ import annotations

import os
import sys

from cluster.local import die_with_parent
from cluster.settings.worker_settings import WorkerSettings
from kvtransfer.carrier import Carrier
from kvtransfer.carriers.grpc_carrier import GrpcCarrier
from kvtransfer.carriers.local_carrier import LocalCarrier
from kvtransfer.carriers.nccl_carrier import NcclCarrier
from kvtransfer.carriers.nixl_carrier import MOVER_MODULE, NixlCarrier
from kvtransfer.carriers.tcp_carrier import TcpCarrier
from kvtransfer.carriers.tcp_connection import TcpSecurity
from kvtransfer.nixl.package import find_nixl
from protocol.endpoints.grpc_endpoints import EndpointSecurity


class WorkerCarriers:
    """The carriers of one worker, which creates them, starts them before it registers, and closes
    them when it ends."""

    def __init__(self, settings: WorkerSettings, security: EndpointSecurity) -> None:
        self._grpc = GrpcCarrier(settings.token, security, settings.kv_port)
        sockets = TcpSecurity(security, settings.tls)
        made: list[Carrier] = [
            LocalCarrier(settings.token),
            NixlCarrier(find_nixl(), settings.trusted_fabric, _mover_command()),
            TcpCarrier(settings.token, sockets, settings.kv_tcp_port),
        ]
        wanted = settings.kv_carriers
        if "nccl" in wanted:  # gloo between engines: for tests, until there is NCCL on GPUs
            made.append(NcclCarrier(settings.trusted_fabric))
        used = [carrier for carrier in made if not wanted or carrier.name in wanted]
        self.all: list[Carrier] = [*used, self._grpc]  # gRPC last: it always works

    @property
    def kv_endpoint(self) -> str:
        """host:port of the KV service over gRPC, once it listens."""
        return self._grpc.endpoint

    async def start(self, host: str) -> None:
        """Start every carrier. Raises StartupError."""
        for carrier in self.all:
            await carrier.start(host)

    async def close(self) -> None:
        """End every carrier, also those that have not been started."""
        for carrier in self.all:
            await carrier.close()


def _mover_command() -> list[str]:
    """Return the command of NIXL's processes, which end with this one."""
    guard = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid())]
    return [*guard, sys.executable, "-m", MOVER_MODULE]
