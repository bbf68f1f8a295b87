"""Settings of workers and routers, and a cluster to launch, out of a configuration."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import SecretStr

from cluster.config.schema import Config
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.settings.launch_settings import Launch
from cluster.settings.worker_settings import WorkerSettings
from engine.ipc.spec import SpeculationSpec
from protocol.roles import ROLES, Role
from protocol.security.tls import HttpTls, TlsFiles
from router.settings import RouterSettings

_SIZES = ("threads", "kv_tokens", "max_batch", "prefill_chunk", "step_budget_ms")


def worker(config: Config, role: Role, **ports: int) -> WorkerSettings:
    """A worker of this role; its model is not located yet. ``ports``: its own."""
    return WorkerSettings(
        role=role,
        cluster=config.cluster,
        redis_url=_revealed(config.redis.url),
        token=_revealed(config.security.token),
        model_path="",
        model_id=config.model.id or "",
        host=config.worker.host,
        max_model_len=config.model.max_len,
        dtype=config.model.dtype,
        kv_precision=config.kv.precision,
        kv_pool=config.kv.pool,
        kv_codec=config.kv.codec,
        device=config.worker.device,
        local_prefill_tokens=config.worker.local_prefill_tokens,
        peak_tflops=config.worker.peak_tflops,
        peak_gb_per_s=config.worker.peak_gb_per_s,
        link_gb_per_s=config.worker.link_gb_per_s,
        engine=config.worker.engine,
        speculation=_speculation(config),
        tls=_tls(config),
        **_sizes(config, role),
        **ports,
    )


def _sizes(config: Config, role: Role) -> dict[str, Any]:
    """What the pool says, else what is said of all workers."""
    pool = config.pools.prefill if role == "prefill" else config.pools.decode
    own = {name: getattr(pool, name) for name in _SIZES}
    return {name: getattr(config.worker, name) if v is None else v for name, v in own.items()}


def _speculation(config: Config) -> SpeculationSpec:
    given = config.speculation
    return SpeculationSpec(method=given.method, model_path=given.model, max_tokens=given.max_tokens)


def router(config: Config) -> RouterSettings:
    """A router; its model is not located yet."""
    https = config.security.http_tls
    return RouterSettings(
        cluster=config.cluster,
        redis_url=_revealed(config.redis.url),
        token=_revealed(config.security.token),
        secret=bytes.fromhex(_revealed(config.security.secret)),
        model_path="",
        model_id=config.model.id or "",
        metrics_host=config.router.metrics_host,
        metrics_port=config.router.metrics_port,
        routing_policy=config.router.policy,
        ttft_slo_s=config.router.ttft_slo_ms / 1000,
        tpot_slo_s=config.router.tpot_slo_ms / 1000,
        admission_ttft_ms=config.router.admission_ttft_ms,
        admission_queue_ms=config.router.admission_queue_ms,
        api_keys=config.security.api_keys,
        tls=_tls(config),
        http_tls=HttpTls(cert=https.cert, key=https.key) if https.cert and https.key else None,
        allow_plain_http=config.security.allow_plain_http,
        **config.limits.model_dump(),
    )


def autoscaler(config: Config) -> AutoscalerSettings:
    """An autoscaler."""
    given = config.autoscaler.model_dump()
    return AutoscalerSettings(
        cluster=config.cluster,
        redis_url=_revealed(config.redis.url),
        token=_revealed(config.security.token),
        model_id=config.model.id or "",
        ttft_slo_s=config.router.ttft_slo_ms / 1000,
        tpot_slo_s=config.router.tpot_slo_ms / 1000,
        tls=_tls(config),
        **given | {"prometheus_url": _revealed(config.autoscaler.prometheus_url) or None},
    )


def launch(config: Config) -> Launch:
    """A cluster on this machine; where it is to be is not known yet."""
    bare = {"redis_url": "", "token": ""}
    return Launch(
        cluster=config.cluster,
        model_path="",
        model_id=config.model.id or "",
        run_dir="",
        events_path="",
        host=config.router.host,
        port=config.router.port,
        prefill=config.pools.prefill.workers,
        decode=config.pools.decode.workers,
        routers=config.router.replicas or 1,
        redis_url=_revealed(config.redis.url) or None,
        workers={r: msgspec.structs.replace(worker(config, r), **bare) for r in ROLES},
        router=msgspec.structs.replace(router(config), **bare, secret=b""),
        autoscaler=msgspec.structs.replace(autoscaler(config), **bare, tls=None),
        token=_revealed(config.security.token) or None,
        secret=_revealed(config.security.secret) or None,
        start_deadline_s=config.start_deadline_s,
        drain_s=config.drain_s,
    )


def _revealed(secret: SecretStr | None) -> str:
    return "" if secret is None else secret.get_secret_value()


def _tls(config: Config) -> TlsFiles | None:
    files = config.security.tls
    if files.ca is None or files.cert is None or files.key is None:
        return None
    return TlsFiles(ca=files.ca, cert=files.cert, key=files.key, name=files.name)
