"""`baton`: up, down, worker, router. Imports of each command happen when it is called."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.options import (
    AdmissionQueue,
    AdmissionTtft,
    ApiKeys,
    Cluster,
    Drain,
    Dtype,
    Host,
    KvCodec,
    KvPool,
    KvPrecision,
    KvTokens,
    LocalPrefill,
    MaxBatch,
    MaxModelLen,
    Model,
    ModelId,
    PrefillChunk,
    RoutingPolicy,
    StepBudgetMs,
    Threads,
    TpotSlo,
    TtftSlo,
)

app = typer.Typer(
    name="baton",
    help="Serves large language models from two pools of workers: prefill and decode.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # they would show secrets
)


@app.command()
def up(
    model: Model = None,
    model_id: ModelId = None,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port, or the next free one above it.")] = 8000,
    redis_url: Annotated[
        str | None, typer.Option(envvar="BATON_REDIS_URL", help="A Redis to use; embedded if none.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it serves.")] = False,
    cluster: Cluster = "default",
    threads: Threads = None,
    kv_tokens: KvTokens = None,
    max_batch: MaxBatch = 64,
    prefill_chunk: PrefillChunk = 512,
    max_model_len: MaxModelLen = None,
    step_budget_ms: StepBudgetMs = None,
    dtype: Dtype = None,
    kv_precision: KvPrecision = "fp8",
    kv_pool: KvPool = "auto",
    kv_codec: KvCodec = "auto",
    local_prefill_tokens: LocalPrefill = 64,
    routing_policy: RoutingPolicy = "cost",
    ttft_slo_ms: TtftSlo = 2000.0,
    tpot_slo_ms: TpotSlo = 100.0,
    admission_ttft_ms: AdmissionTtft = None,
    admission_queue_ms: AdmissionQueue = None,
    api_keys: ApiKeys = None,
    drain_s: Drain = 30.0,
) -> None:
    """Start a cluster on this machine: workers, router, Redis, Ray."""
    from cluster.launch import Launch
    from cluster.up import up as run

    launch = Launch(
        cluster=cluster,
        model_path="",
        model_id=model_id or "",
        run_dir="",
        events_path="",
        host=host,
        port=port,
        prefill=prefill,
        decode=decode,
        redis_url=redis_url,
        threads=threads,
        kv_tokens=kv_tokens,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
        max_model_len=max_model_len,
        step_budget_ms=step_budget_ms,
        dtype=dtype,
        kv_precision=kv_precision,
        kv_pool=kv_pool,
        kv_codec=kv_codec,
        local_prefill_tokens=local_prefill_tokens,
        routing_policy=routing_policy,
        ttft_slo_ms=ttft_slo_ms,
        tpot_slo_ms=tpot_slo_ms,
        admission_ttft_ms=admission_ttft_ms,
        admission_queue_ms=admission_queue_ms,
        api_keys=str(api_keys.resolve()) if api_keys else None,
        drain_s=drain_s,
    )
    raise typer.Exit(run(launch, model, detach=detach))


@app.command()
def down(cluster: Cluster = "default", drain_s: Drain = 30.0) -> None:
    """Stop the cluster that `baton up` started, and whatever a killed one left behind."""
    from cluster.down import down as run
    from protocol.errors import StartupError

    try:
        raise typer.Exit(run(cluster, drain_s, typer.echo))
    except StartupError as e:
        raise _failure(e) from None


@app.command()
def worker(
    role: Annotated[str, typer.Option(help="prefill or decode.")],
    redis_url: Annotated[str, typer.Option(envvar="BATON_REDIS_URL", help="The cluster's Redis.")],
    model: Model = None,
    model_id: ModelId = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Control port; 0: any.")] = 0,
    kv_port: Annotated[int, typer.Option(help="KV port; 0: any.")] = 0,
    metrics_port: Annotated[int, typer.Option(help="Metrics port; 0: any.")] = 0,
    cluster: Cluster = "default",
    threads: Threads = None,
    kv_tokens: KvTokens = None,
    max_batch: MaxBatch = 64,
    prefill_chunk: PrefillChunk = 512,
    max_model_len: MaxModelLen = None,
    step_budget_ms: StepBudgetMs = None,
    dtype: Dtype = None,
    kv_precision: KvPrecision = "fp8",
    kv_pool: KvPool = "auto",
    kv_codec: KvCodec = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
    local_prefill_tokens: LocalPrefill = 64,
    drain_s: Drain = 30.0,
) -> None:
    """Run one worker in the foreground, without Ray. Its token comes from BATON_TOKEN."""
    from cluster import models, standalone
    from cluster.settings import WorkerSettings, as_role
    from protocol.errors import StartupError

    try:
        found = models.resolve(model, model_id)
        settings = WorkerSettings(
            role=as_role(role),
            cluster=cluster,
            redis_url=redis_url,
            token=standalone.token(),
            model_path=str(found.path),
            model_id=found.id,
            host=host,
            port=port,
            kv_port=kv_port,
            metrics_port=metrics_port,
            threads=threads,
            kv_tokens=kv_tokens,
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
            max_model_len=max_model_len,
            step_budget_ms=step_budget_ms,
            dtype=dtype,
            kv_precision=kv_precision,
            kv_pool=kv_pool,
            kv_codec=kv_codec,
            device=device,
            local_prefill_tokens=local_prefill_tokens,
        )
        settings.check()
        raise typer.Exit(standalone.run_worker(settings, drain_s))
    except StartupError as e:
        raise _failure(e) from None


@app.command()
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
        raise _failure(e) from None


def _failure(error: Exception) -> typer.Exit:
    typer.echo(f"baton: {error}", err=True)
    return typer.Exit(1)


if __name__ == "__main__":
    app()
