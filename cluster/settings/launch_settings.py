"""What `baton up` hands to the supervisor: a file of mode 0600 in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from cluster.local.run_state import write_private
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.settings.worker_settings import WorkerSettings
from protocol.errors import StartupError
from protocol.registry.redis_access import check_exposure
from protocol.roles import Role
from router.settings import RouterSettings


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster to start, with everything that could be checked beforehand checked."""

    cluster: str
    model_path: str
    model_id: str
    run_dir: str
    events_path: str
    host: str  # of the router's HTTP server
    port: int
    prefill: int  # workers
    decode: int
    routers: int
    redis_url: str | None  # None: one of its own
    workers: dict[Role, WorkerSettings]  # of each pool, without what is only known at the start
    router: RouterSettings  # likewise
    autoscaler: AutoscalerSettings  # likewise
    token: str | None = None  # None: drawn at the start
    secret: str | None = None  # in hex; likewise
    start_deadline_s: float = 180.0
    drain_s: float = 30.0

    @property
    def url(self) -> str:
        return self.router.url_at(self.host, self.port)

    @property
    def counts(self) -> str:
        routers = f"{self.routers} router{'s' if self.routers != 1 else ''}"
        mode = self.autoscaler.mode
        scaler = "" if mode == "off" else f", an autoscaler ({mode})"
        return f"{self.prefill} prefill, {self.decode} decode, {routers}{scaler}"

    def most_workers(self, gpus: int) -> int:
        """On a machine with so many GPUs, to be shared among them all where they are too few for
        the first ones to have one each."""
        first = self.prefill + self.decode
        if self.autoscaler.mode != "act" or gpus >= first:
            return first
        return max(first, self.autoscaler.limits.most.total)

    def with_workers(self, counts: Mapping[Role, int]) -> Launch:
        """With numbers of workers as an autoscaler left them, within its limits as they are now,
        and one at least of what is deployed."""
        least, most = self.autoscaler.limits.least, self.autoscaler.limits.most
        kept = {
            role: min(max(count, least.of(role), 1), most.of(role))
            for role, count in counts.items()
        }
        return msgspec.structs.replace(self, **kept)

    def check(self) -> None:
        """Raises StartupError for what one machine under Ray cannot be."""
        if self.redis_url is not None:
            check_exposure(self.redis_url)
        device = self.workers["decode"].device
        if device is not None and ":" in device:
            raise StartupError(f"device {device!r}: expected cpu or cuda; Ray hands out the GPUs")

    def write(self) -> Path:
        path = Path(self.run_dir) / "launch.json"
        write_private(path, msgspec.json.encode(self))
        return path


def read_launch(path: Path) -> Launch:
    return msgspec.json.decode(path.read_bytes(), type=Launch)
