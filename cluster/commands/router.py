"""`baton router`."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.commands.failing import failure
from cluster.options import (
    AdmissionQueue,
    AdmissionTtft,
    ApiKeys,
    Cluster,
    Drain,
    Host,
    Model,
    ModelId,
    RoutingPolicy,
    TpotSlo,
    TtftSlo,
)


def router(
    redis_url: Annotated[str, typer.Option(envvar="BATON_REDIS_URL", help="The cluster's Redis.")],
    model: Model = None,
    model_id: ModelId = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP port.")] = 8000,
    cluster: Cluster = "default",
    routing_policy: RoutingPolicy = "cost",
    ttft_slo_ms: TtftSlo = 2000.0,
    tpot_slo_ms: TpotSlo = 100.0,
    admission_ttft_ms: AdmissionTtft = None,
    admission_queue_ms: AdmissionQueue = None,
    api_keys: ApiKeys = None,
    drain_s: Drain = 30.0,
) -> None:
    """Run one router in the foreground, without Ray. Needs BATON_TOKEN and BATON_SECRET."""
    from cluster import models, standalone
    from protocol.auth import check_bind
    from protocol.errors import StartupError
    from router.settings import RouterSettings

    try:
        check_bind(host)
        found = models.resolve(model, model_id)
        settings = RouterSettings(
            cluster=cluster,
            redis_url=redis_url,
            token=standalone.token(),
            secret=standalone.secret(),
            model_path=str(found.path),
            model_id=found.id,
            routing_policy=routing_policy,
            ttft_slo_s=ttft_slo_ms / 1000,
            tpot_slo_s=tpot_slo_ms / 1000,
            admission_ttft_ms=admission_ttft_ms,
            admission_queue_ms=admission_queue_ms,
            api_keys=str(api_keys) if api_keys else None,
        )
        settings.check()
        raise typer.Exit(standalone.run_router(settings, host, port, drain_s))
    except StartupError as e:
        raise failure(e) from None
