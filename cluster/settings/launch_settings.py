"""The settings of a whole cluster, which `baton up` writes for the supervisor (mode 0600)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from cluster.local.run_state import write_private
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.settings.worker_settings import WorkerSettings
from protocol.errors import UsageError
from protocol.registry.redis_client import check_exposure
from protocol.roles import Role
from protocol.security.certificates import is_issued_by, pem_hosts
from router.settings import RouterSettings


def share_of_gpu(gpus: int, workers: int) -> float:
    """Return the share of a GPU that each of a machine's ``workers`` gets: a GPU of its own, or an
    equal part. Ray gives a worker a part of one GPU, never of two: three workers on two GPUs get a
    half each. Without GPUs it is 0."""
    if gpus == 0:
        return 0.0
    # Rounded down to the precision in which Ray counts, so that all parts fit.
    return int(10_000 / -(-max(1, workers) // gpus)) / 10_000


class LaunchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster to start, after every check that needs no running process.

    ``workers``, ``router`` and ``autoscaler`` lack what is known only at the start or on the node:
    folders of the model, secrets and certificates.
    """

    cluster: str
    model_path: str
    model_id: str
    run_dir: str
    events_path: str
    host: str  # of the routers' HTTP servers
    port: int
    prefill: int  # number of workers
    decode: int  # number of workers
    routers: int  # number of routers
    redis_url: str | None  # None: the supervisor starts one
    workers: dict[Role, WorkerSettings]
    router: RouterSettings
    autoscaler: AutoscalerSettings
    token: str | None  # None: the supervisor draws one
    secret: str | None  # in hex; None: the supervisor draws one
    start_deadline_s: float
    drain_s: float

    @property
    def url(self) -> str:
        """URL at which clients reach the routers. Where they listen on all addresses, it has a host
        that their certificate proves, or else that of this machine's loopback."""
        host = self.host
        if host in _ALL_ADDRESSES:
            host = _ALL_ADDRESSES[host]
            if self.router.http_tls is not None:
                own = self.router.tls.name if self.router.tls else None
                names = [n for n in _certificate_names(self.router.http_tls.cert) if n != own]
                host = next((name for name in names if "*" not in name), host)
        return self.router.url_at(host, self.port)

    @property
    def https_ca(self) -> str | None:
        """File of the CA that issued the routers' HTTPS certificate: that of the cluster, or ca.pem
        beside the certificate. None for another CA, and without HTTPS."""
        https, own = self.router.http_tls, self.router.tls
        if https is None:
            return None
        for path in (own.ca if own else None, str(Path(https.cert).parent / "ca.pem")):
            if path is not None and _is_issuer(https.cert, path):
                return path
        return None

    @property
    def counts(self) -> str:
        """Numbers of processes in words, for the terminal."""
        routers = f"{self.routers} router{'s' if self.routers != 1 else ''}"
        mode = self.autoscaler.mode
        scaler = "" if mode == "off" else f", an autoscaler ({mode})"
        return f"{self.prefill} prefill, {self.decode} decode, {routers}{scaler}"

    @property
    def replicas(self) -> int:
        """Number of replicas of all kinds: workers, routers, and the autoscaler."""
        return self.prefill + self.decode + self.routers + int(self.autoscaler.mode != "off")

    def most_workers(self, gpus: int) -> int:
        """Return the number of workers that share the GPUs of a machine with ``gpus`` of them.

        Where each worker of the start has a GPU of its own, later workers need not be counted."""
        first = self.prefill + self.decode
        if self.autoscaler.mode != "act" or gpus >= first:
            return first
        return max(first, self.autoscaler.limits.most.total)

    def with_workers(self, counts: Mapping[Role, int]) -> LaunchSettings:
        """Return these settings with the numbers of workers that an autoscaler left, clamped to its
        present limits and to at least one worker per deployed pool."""
        least, most = self.autoscaler.limits.least, self.autoscaler.limits.most
        kept = {
            role: min(max(count, least.of(role), 1), most.of(role))
            for role, count in counts.items()
        }
        return msgspec.structs.replace(self, **kept)

    def check(self) -> None:
        """Raise StartupError for settings that one machine under Ray cannot have."""
        if self.redis_url is not None:
            check_exposure(self.redis_url)

    def check_device(self) -> None:
        """Raise UsageError for a certain GPU."""
        device = self.workers["decode"].engine.device
        if device is not None and ":" in device:
            raise UsageError(
                f"worker.device: expected cpu or cuda, not {device!r}: Ray assigns the GPUs"
            )

    def write(self) -> Path:
        path = Path(self.run_dir) / "launch.json"
        write_private(path, msgspec.json.encode(self))
        return path


_ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def _certificate_names(cert: str) -> list[str]:
    """Return the host names in a certificate; none if it cannot be read."""
    try:
        return pem_hosts(Path(cert).read_bytes())
    except (OSError, ValueError):
        return []


def _is_issuer(cert: str, ca: str) -> bool:
    try:
        return is_issued_by(Path(cert).read_bytes(), Path(ca).read_bytes())
    except OSError:
        return False


def read_launch(path: Path) -> LaunchSettings:
    return msgspec.json.decode(path.read_bytes(), type=LaunchSettings)
