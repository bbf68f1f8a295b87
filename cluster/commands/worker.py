"""`baton worker`."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.commands.failing import failure
from cluster.options import (
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
    StepBudgetMs,
    Threads,
)


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
        raise failure(e) from None
