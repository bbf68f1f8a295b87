"""`baton up`."""

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
