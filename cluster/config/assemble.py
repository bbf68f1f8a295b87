"""Settings of each program, made from a configuration: where units and layouts are converted.

The command line calls these functions, and so do the replicas of Ray Serve for the part of the
configuration that belongs to their node. Models are not located yet: ``model_path`` is empty.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from pydantic import SecretStr

from cluster.config.schema import Config
from cluster.config.value_checks import split_host_names
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.settings.launch_settings import LaunchSettings
from cluster.settings.worker_settings import WorkerSettings
from engine.ipc.settings import EngineSettings, MachineCeilings, SpeculationSettings
from protocol.roles import ROLES, Role
from protocol.security.tls import HttpTls, TlsFiles
from router.settings import RouterSettings

_POOL_KEYS = ("threads", "kv_tokens", "max_batch", "prefill_chunk", "step_budget_ms")


def worker_settings(config: Config, role: Role, **ports: Any) -> WorkerSettings:
    """Return the settings of a worker; ``ports`` are its four ports by name."""
    return WorkerSettings(
        cluster=config.cluster,
        redis_url=_reveal(config.redis.url),
        token=_reveal(config.security.token),
        model_id=config.model.id or "",
        host=config.worker.host,
        link_bytes_s=1e9 * (config.worker.link_gb_per_s or 0.0),
        trusted_fabric=config.kv.fabric == "trusted",
        engine=_engine_settings(config, role),
        engine_module=config.worker.engine,
        tls=_tls_files(config),
        **ports,
    )


def _engine_settings(config: Config, role: Role) -> EngineSettings:
    worker, drafts = config.worker, config.speculation
    return EngineSettings(
        model_path="",
        role=role,
        dtype=config.model.dtype,
        device=worker.device,
        gpu_share=worker.gpu_share,
        max_model_len=config.model.max_len,
        kv_precision=config.kv.precision,
        batch_invariant=worker.batch_invariant,
        ttft_slo_s=config.router.ttft_slo_ms / 1000,
        tpot_slo_s=config.router.tpot_slo_ms / 1000,
        # A prefill worker decodes no tokens, so that proposers would only cost time there.
        speculation=SpeculationSettings(
            method=drafts.method if role == "decode" else "off",
            model_path=drafts.model if role == "decode" else None,
            max_tokens=drafts.max_tokens,
        ),
        ceilings=MachineCeilings(
            flops=1e12 * (worker.peak_tflops or 0.0), bytes=1e9 * (worker.peak_gb_per_s or 0.0)
        ),
        **_pool_values(config, role),
    )


def _pool_values(config: Config, role: Role) -> dict[str, Any]:
    """Return the keys that a pool can override: the pool's value, else the one of all workers."""
    pool = config.pools.prefill if role == "prefill" else config.pools.decode
    own = {name: getattr(pool, name) for name in _POOL_KEYS}
    return {name: getattr(config.worker, name) if v is None else v for name, v in own.items()}


def router_settings(config: Config) -> RouterSettings:
    """Return the settings of a router."""
    https, hosts = config.security.http_tls, config.security.allowed_hosts
    api = config.api.model_dump()
    if config.api.cors_origins is not None:
        api["cors_origins"] = split_host_names(config.api.cors_origins)
    api["model_aliases"] = split_host_names(config.api.model_aliases or "")
    return RouterSettings(
        cluster=config.cluster,
        redis_url=_reveal(config.redis.url),
        token=_reveal(config.security.token),
        secret=bytes.fromhex(_reveal(config.security.secret)),
        model_path="",
        model_id=config.model.id or "",
        metrics_host=config.router.metrics_host,
        metrics_port=config.router.metrics_port,
        ttft_slo_s=config.router.ttft_slo_ms / 1000,
        tpot_slo_s=config.router.tpot_slo_ms / 1000,
        admission_ttft_ms=config.router.admission_ttft_ms,
        admission_queue_ms=config.router.admission_queue_ms,
        api_keys=config.security.api_keys,
        usage_log=config.router.usage_log,
        access_log=config.router.access_log,
        otlp_endpoint=config.router.otlp_endpoint,
        allowed_hosts=None if hosts is None else split_host_names(hosts),
        tls=_tls_files(config),
        http_tls=HttpTls(cert=https.cert, key=https.key) if https.cert and https.key else None,
        allow_plain_http=config.security.allow_plain_http,
        **api,
        **config.limits.model_dump(),
    )


def autoscaler_settings(config: Config) -> AutoscalerSettings:
    """Return the settings of an autoscaler."""
    section = config.autoscaler.model_dump()
    section["prometheus_url"] = _reveal(config.autoscaler.prometheus_url) or None
    return AutoscalerSettings(
        cluster=config.cluster,
        redis_url=_reveal(config.redis.url),
        token=_reveal(config.security.token),
        model_id=config.model.id or "",
        ttft_slo_s=config.router.ttft_slo_ms / 1000,
        tpot_slo_s=config.router.tpot_slo_ms / 1000,
        tls=_tls_files(config),
        **section,
    )


def launch_settings(config: Config) -> LaunchSettings:
    """Return the settings of a cluster on this machine, without its folders. Secrets are in the
    settings of no process: each node adds its own."""
    secrets = {"redis_url": "", "token": ""}
    return LaunchSettings(
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
        redis_url=_reveal(config.redis.url) or None,
        workers={role: replace(worker_settings(config, role), **secrets) for role in ROLES},
        router=replace(router_settings(config), **secrets, secret=b""),
        autoscaler=replace(autoscaler_settings(config), **secrets, tls=None),
        token=_reveal(config.security.token) or None,
        secret=_reveal(config.security.secret) or None,
        start_deadline_s=config.start_deadline_s,
        drain_s=config.drain_s,
    )


def _reveal(secret: SecretStr | None) -> str:
    return "" if secret is None else secret.get_secret_value()


def _tls_files(config: Config) -> TlsFiles | None:
    files = config.security.tls
    if files.ca is None or files.cert is None or files.key is None:
        return None
    return TlsFiles(ca=files.ca, cert=files.cert, key=files.key, name=files.name)
