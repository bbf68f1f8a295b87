"""What a worker is told at its start. Frozen and picklable: Ray carries it to the replica."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from cluster.settings.choices import ENGINE, is_module_name
from engine.ipc.spec import MOST_DRAFTED, Ceilings, EngineSpec, SpeculationSpec
from engine.kv_cache.kv_format import Precision, StorageChoice
from kvtransfer.codec_choice import Wanted
from protocol.errors import StartupError
from protocol.registry.directory import check_url
from protocol.registry.redis_access import check_exposure
from protocol.roles import Role, as_role
from protocol.security.cluster_token import check_bind
from protocol.security.tls import TlsFiles, check_files


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of either role. ``None`` leaves a choice to the engine; port 0 to the system."""

    role: Role
    cluster: str
    redis_url: str
    token: str
    model_path: str
    model_id: str
    host: str = "127.0.0.1"
    port: int = 0
    kv_port: int = 0
    threads: int | None = None
    kv_tokens: int | None = None
    max_batch: int = 64
    prefill_chunk: int = 512
    max_model_len: int | None = None
    step_budget_ms: float | None = None
    dtype: str | None = None
    kv_precision: Precision = "fp8"
    kv_pool: StorageChoice = "auto"
    kv_codec: Wanted = "auto"
    device: str | None = None
    # Prompts with at most this many uncached tokens are prefilled on the decode worker itself.
    local_prefill_tokens: int = 64
    # Of decode workers; ``model_path`` as it was given, until it is located.
    speculation: SpeculationSpec = SpeculationSpec(method="auto")
    metrics_port: int = 0
    # What the machine can do at most; None: measured.
    peak_tflops: float | None = None
    peak_gb_per_s: float | None = None
    link_gb_per_s: float | None = None
    engine: str = ENGINE  # run as the engine's process; it takes what ENGINE takes
    tls: TlsFiles | None = None  # beyond loopback there must be one

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["token"] = "..."
        shown["redis_url"] = without_password(self.redis_url)
        return f"WorkerSettings({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def check(self) -> None:
        """Raises StartupError for what cannot work, before a process is started on it."""
        as_role(self.role)
        if not self.token:
            raise StartupError("a worker needs the cluster token: set BATON_TOKEN")
        check_bind(self.host, tls=self.tls is not None)
        if self.tls is not None:
            check_files(self.tls, self.host)
        check_url(self.redis_url)
        check_exposure(self.redis_url)
        for name in ("port", "kv_port", "metrics_port"):
            value = getattr(self, name)
            if not 0 <= value <= 65535:
                raise StartupError(f"{name} must be in 0..65535 (0: any free one), not {value}")
        if self.step_budget_ms is not None and not 0 <= self.step_budget_ms < float("inf"):
            given_ms = self.step_budget_ms
            raise StartupError(f"step_budget_ms must be at least 0 (0: no bound), not {given_ms}")
        if self.kv_precision == "exact":
            for name in ("kv_pool", "kv_codec"):
                if getattr(self, name) == "fp8":
                    raise StartupError(
                        f"{name} fp8 would round KV that is to be exact: use kv_precision fp8,"
                        f" or leave {name} at auto"
                    )
        if self.local_prefill_tokens < 0:
            given = self.local_prefill_tokens
            raise StartupError(f"local_prefill_tokens must be at least 0, not {given}")
        if not 1 <= self.speculation.max_tokens <= MOST_DRAFTED:
            given = self.speculation.max_tokens
            raise StartupError(f"speculation max_tokens must be in 1..{MOST_DRAFTED}, not {given}")
        if not is_module_name(self.engine):
            raise StartupError(f"engine must be a Python module's name, not {self.engine!r}")
        for name in ("peak_tflops", "peak_gb_per_s", "link_gb_per_s"):
            peak = getattr(self, name)
            if peak is not None and not 0 < peak < float("inf"):
                raise StartupError(f"{name} must be above 0, not {peak}")
        for name in ("threads", "kv_tokens", "max_batch", "prefill_chunk", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise StartupError(f"{name} must be at least 1, not {value}")


def engine_of(settings: WorkerSettings) -> EngineSpec:
    """What a worker of these settings tells its engine."""
    return EngineSpec(
        model_path=settings.model_path,
        role=settings.role,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        kv_tokens=settings.kv_tokens,
        max_batch=settings.max_batch,
        chunk=settings.prefill_chunk,
        max_model_len=settings.max_model_len,
        step_budget_ms=settings.step_budget_ms,
        kv_precision=settings.kv_precision,
        kv_storage=settings.kv_pool,
        speculation=settings.speculation if settings.role == "decode" else SpeculationSpec(),
        ceilings=Ceilings(
            flops=1e12 * (settings.peak_tflops or 0.0), bytes=1e9 * (settings.peak_gb_per_s or 0.0)
        ),
    )


def without_password(url: str) -> str:
    """``url`` as it may be shown: no password and no options, among which there may be one. Of what
    is not quite a URL nothing is shown."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "(not a URL)"
    if (
        not parts.scheme or "@" in parts.path + parts.query + parts.fragment
    ):  # a password with / ? # in it
        return "(not a URL)"
    user = f"{parts.username or ''}:...@" if "@" in parts.netloc else ""
    at = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{user}{at}{f':{port}' if port else ''}{parts.path}"
