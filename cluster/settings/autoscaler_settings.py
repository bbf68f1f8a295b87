"""What an autoscaler is told at its start. Frozen: Ray carries it to the replica."""

from __future__ import annotations

import msgspec

from cluster.settings.choices import Mode
from cluster.settings.worker_settings import without_password
from cluster.sizing.snapshot import Counts, Goals, Limits, Tuning
from protocol.errors import StartupError
from protocol.registry.directory import check_url
from protocol.registry.redis_access import check_exposure
from protocol.security.cluster_token import check_bind
from protocol.security.tls import TlsFiles, check_files


class AutoscalerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One autoscaler. Fields without a note are keys of the section `autoscaler`."""

    cluster: str
    redis_url: str
    token: str
    model_id: str = ""  # "": any worker knows
    ttft_slo_s: float = 2.0
    tpot_slo_s: float = 0.1
    mode: Mode = "off"
    prometheus_url: str | None = None
    interval_s: float = 5.0
    window_s: float = 60.0
    prefill_min: int = 1
    prefill_max: int = 8
    decode_min: int = 1
    decode_max: int = 8
    gpus: float | None = None
    loans: bool = True
    loan_drain_s: float = 2.0
    down_after_s: float = 180.0
    down_every_s: float = 20.0
    warm_up_s: float = 30.0
    start_s: float = 60.0
    log: str | None = None
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0  # 0: any
    tls: TlsFiles | None = None  # beyond loopback there must be one

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["token"] = "..."
        for name in ("redis_url", "prometheus_url"):
            shown[name] = shown[name] and without_password(shown[name])
        return f"AutoscalerSettings({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def check(self) -> None:
        """Raises StartupError for what cannot work."""
        if not self.token:
            raise StartupError("an autoscaler needs the cluster token: set BATON_TOKEN")
        check_bind(self.metrics_host, tls=self.tls is not None)
        if self.tls is not None:
            check_files(self.tls, self.metrics_host)
        check_url(self.redis_url)
        check_exposure(self.redis_url)

    @property
    def goals(self) -> Goals:
        return Goals(ttft_s=self.ttft_slo_s, tpot_s=self.tpot_slo_s)

    @property
    def limits(self) -> Limits:
        return Limits(
            least=Counts(prefill=self.prefill_min, decode=self.decode_min),
            most=Counts(prefill=self.prefill_max, decode=self.decode_max),
            gpus=self.gpus,
        )

    def tuning(self, start_s: float) -> Tuning:
        """``start_s``: as seen, or as assumed."""
        return Tuning(
            loans=self.loans,
            down_after_s=self.down_after_s,
            lend_after_s=self.down_after_s / 10,
            down_every_s=self.down_every_s,
            start_s=start_s,
        )
