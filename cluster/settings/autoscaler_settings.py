"""The settings of an autoscaler. They are frozen, because Ray carries them to the replica."""

from __future__ import annotations

import msgspec

from cluster.settings import AutoscalerMode
from cluster.settings.connection import check_connections, without_password
from cluster.sizing.snapshot import PoolLimits, ScalingTuning, SloTargets, WorkerCounts
from protocol.security.tls import TlsFiles


class AutoscalerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one autoscaler. Fields without a comment are keys of the section
    ``autoscaler``, which documents them."""

    cluster: str
    redis_url: str
    token: str
    model_id: str  # "": taken from any worker
    ttft_slo_s: float
    tpot_slo_s: float
    mode: AutoscalerMode
    prometheus_url: str | None
    interval_s: float
    window_s: float
    prefill_min: int
    prefill_max: int
    decode_min: int
    decode_max: int
    gpus: float | None
    loans: bool
    loan_drain_s: float
    down_after_s: float | None
    down_every_s: float
    warm_up_s: float
    start_s: float
    log: str | None
    metrics_host: str = "127.0.0.1"  # has no key
    metrics_port: int = 0  # has no key; 0: any free one
    tls: TlsFiles | None  # required beyond loopback

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["token"] = "..."
        for name in ("redis_url", "prometheus_url"):
            shown[name] = shown[name] and without_password(shown[name])
        return f"AutoscalerSettings({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def check(self) -> None:
        """Check the parts that the configuration schema does not check. Raises StartupError."""
        host = self.metrics_host
        check_connections("an autoscaler", self.token, self.redis_url, self.tls, host)

    @property
    def goals(self) -> SloTargets:
        """Latency objectives."""
        return SloTargets(ttft_s=self.ttft_slo_s, tpot_s=self.tpot_slo_s)

    @property
    def limits(self) -> PoolLimits:
        """Smallest and largest numbers of workers."""
        return PoolLimits(
            least=WorkerCounts(prefill=self.prefill_min, decode=self.decode_min),
            most=WorkerCounts(prefill=self.prefill_max, decode=self.decode_max),
            gpus=self.gpus,
        )

    def tuning(self, start_s: float) -> ScalingTuning:
        """Return the tuning of decisions. ``start_s``: how long a start takes, seen or assumed."""
        return ScalingTuning(
            loans=self.loans,
            loan_drain_s=self.loan_drain_s,
            down_after_s=self.down_after_s,
            down_every_s=self.down_every_s,
            start_s=start_s,
        )
