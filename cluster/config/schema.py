"""The keys of the configuration. Everything else is derived from here: flags, variables, checks."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, SecretStr

from cluster.config import values
from cluster.config.autoscaler import AutoscalerSection
from cluster.config.fields import NO_FLAG, Section, key, section
from cluster.engine_module import ENGINE
from engine.kv_format import Precision, StorageChoice
from engine.spec import MOST_DRAFTED, SpeculationMethod
from kvtransfer.codecs import Wanted
from router.policies import PolicyName

ClusterName: TypeAlias = Annotated[str, AfterValidator(values.cluster_name)]
Host: TypeAlias = Annotated[str, AfterValidator(values.host)]
DnsName: TypeAlias = Annotated[str, AfterValidator(values.dns_name)]
Device: TypeAlias = Annotated[str, AfterValidator(values.device)]
ModuleName: TypeAlias = Annotated[str, AfterValidator(values.module_name)]
RedisUrl: TypeAlias = Annotated[SecretStr, AfterValidator(values.redis_url)]
Token: TypeAlias = Annotated[SecretStr, AfterValidator(values.token)]
HexSecret: TypeAlias = Annotated[SecretStr, AfterValidator(values.hex_secret)]
FileName: TypeAlias = Annotated[str, "file"]
"""Path of a file that must be there; in a configuration file, relative to its folder."""


class ModelSection(Section):
    path: str | None = key(None, "Model folder or hub id; null: the demo model.", "--model")
    id: str | None = key(None, "Name that clients give the model.", "--model-id")
    dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        None, "Of the computation; null: float32 on a CPU, bfloat16 on a GPU."
    )
    max_len: int | None = key(
        None, "Longest context in tokens; null: the model's.", "--max-model-len", ge=1
    )


class WorkerSection(Section):
    host: Host = key("127.0.0.1", "Address that workers listen on.", "--worker-host")
    device: Device | None = key(None, "cpu, cuda or cuda:N; null: a GPU where there is one.")
    threads: int | None = key(None, "CPU threads of each engine; null: it chooses.", ge=1)
    kv_tokens: int | None = key(None, "Tokens in each worker's KV pool; null: it chooses.", ge=32)
    max_batch: int = key(64, "Sequences in a step.", ge=1)
    prefill_chunk: int = key(512, "Prompt tokens in a step.", ge=1)
    step_budget_ms: float | None = key(
        None,
        "Milliseconds of a step in which streams wait for a prompt's chunk; 0: no bound; "
        "null: 50 on decode workers, none on prefill workers.",
        ge=0,
    )
    local_prefill_tokens: int = key(
        64, "Uncached prompt tokens prefilled on the decode worker.", ge=0
    )
    peak_tflops: float | None = key(
        None, "TFLOP/s that a worker reaches at most; null: measured at its start.", gt=0
    )
    peak_gb_per_s: float | None = key(
        None, "GB/s that it reads from memory at most; null: measured at its start.", gt=0
    )
    link_gb_per_s: float | None = key(
        None, "GB/s that its network link brings at most; null: the best seen.", gt=0
    )
    engine: ModuleName = key(
        ENGINE, "Module that is run as each engine's process.", "--worker-engine"
    )


class PoolSection(Section):
    workers: int = key(1, "Workers in the pool.", ge=0)
    threads: int | None = key(None, "As worker.threads, for this pool.", ge=1)
    kv_tokens: int | None = key(None, "As worker.kv_tokens, for this pool.", ge=32)
    max_batch: int | None = key(None, "As worker.max_batch, for this pool.", ge=1)
    prefill_chunk: int | None = key(None, "As worker.prefill_chunk, for this pool.", ge=1)
    step_budget_ms: float | None = key(None, "As worker.step_budget_ms, for this pool.", ge=0)


class PrefillPoolSection(PoolSection):
    workers: int = key(1, "Workers in the pool; 0: decode workers prefill, too.", ge=0)


class DecodePoolSection(PoolSection):
    workers: int = key(1, "Workers in the pool.", ge=1)


class PoolsSection(Section):
    prefill: PrefillPoolSection = section(
        "Prefill workers; null: as worker says.", PrefillPoolSection
    )
    decode: DecodePoolSection = section("Decode workers; null: as worker says.", DecodePoolSection)


class KvSection(Section):
    precision: Precision = key(
        "fp8", "exact: as computed; fp8: rounded, with less to store and send.", "--kv-precision"
    )
    pool: StorageChoice = key(
        "auto", "fp8: the KV pool holds bytes; wide: the model's type.", "--kv-pool"
    )
    codec: Wanted = key("auto", "KV on the wire; values are the same either way.", "--kv-codec")


class SpeculationSection(Section):
    method: SpeculationMethod = key(
        "auto", "What drafts tokens; auto: what model is, ngram without one.", "--speculation"
    )
    model: str | None = key(
        None,
        "Folder or hub id of a draft model, or of Medusa or EAGLE heads; null: the demo model "
        "brings its own, others have none.",
        "--speculation-model",
    )
    max_tokens: int = key(
        8,
        "Most tokens drafted for a sequence in a step; each step takes as many as pay.",
        "--speculation-tokens",
        ge=1,
        le=MOST_DRAFTED,
    )


class RouterSection(Section):
    host: Host = key("127.0.0.1", "Address that clients reach.")
    port: int = key(8000, "HTTP port; `baton up` takes the next free one.", ge=1, le=65535)
    replicas: int | None = key(
        None,
        "Routers, which share the port on one host; null: 1, and on a Ray cluster one for each"
        " node that takes any.",
        "--routers",
        ge=1,
        le=1024,
    )
    metrics_host: Host = key(
        "127.0.0.1", "Address of the router's own metrics.", "--router-metrics-host"
    )
    metrics_port: int = key(
        0, "Port of the router's own metrics; 0: any.", "--router-metrics-port", ge=0, le=65535
    )
    policy: PolicyName = key("cost", "How workers are chosen.", "--routing-policy")
    ttft_slo_ms: float = key(2000.0, "Objective: ms to the first token.", ge=1)
    tpot_slo_ms: float = key(100.0, "Objective: ms for each further token.", ge=1)
    admission_ttft_ms: float | None = key(
        None,
        "Refuse requests whose first token is predicted later than this; null: 10 times the "
        "objective.",
        ge=1,
    )
    admission_queue_ms: float | None = key(
        None,
        "Refuse requests that are predicted to queue longer; below the objective, goodput lasts "
        "under overload; null: no bound.",
        ge=1,
    )


class LimitsSection(Section):
    max_body_bytes: int = key(8 * 2**20, "Bytes of a request's body.", ge=1024, le=2**30)
    body_timeout_s: float = key(
        30.0, "Seconds to a request's headers, and again to its body.", gt=0, le=3600
    )
    max_requests: int = key(1024, "Requests in a router at once, of one priority.", ge=1)
    request_timeout_s: float = key(
        600.0, "Seconds from a request's arrival to its end.", gt=0, le=3600
    )
    first_token_timeout_s: float = key(120.0, "Seconds to a request's first token.", gt=0, le=3600)
    resubmit_wait_s: float = key(
        10.0, "Seconds that an interrupted request waits for a decode worker.", gt=0, le=3600
    )
    client_buffer_tokens: int = key(
        1024, "Tokens that a client may lag behind before it loses its request.", ge=1
    )


class RedisSection(Section):
    url: RedisUrl | None = key(
        None, "redis://, rediss:// or unix://; null: `baton up` brings one.", "--redis-url"
    )


class TlsSection(Section):
    name: DnsName | None = key(None, "DNS name that all prove; null: their address.", "--tls-name")
    ca: FileName | None = key(None, "Certificate of the cluster's CA.", "--tls-ca")
    cert: FileName | None = key(None, "This node's certificate.", "--tls-cert")
    key: FileName | None = key(None, "Its private key.", "--tls-key")


class HttpTlsSection(Section):
    cert: FileName | None = key(None, "Certificate for clients, with its chain.", "--http-tls-cert")
    key: FileName | None = key(None, "Its private key.", "--http-tls-key")


class SecuritySection(Section):
    api_keys: FileName | None = key(
        None, "YAML file of API keys and their tenants; null: any key, one tenant."
    )
    allow_plain_http: bool = key(False, "Beyond loopback: a proxy in front speaks TLS.")
    # No flags for these two: every user of the machine could read them.
    token: Token | None = key(
        None, "Every process of the cluster has it; null: `baton up` draws one.", NO_FLAG
    )
    secret: HexSecret | None = key(
        None, "Root of the prefix cache's keys, in hex; null: `baton up` draws one.", NO_FLAG
    )
    tls: TlsSection = section("Between Baton's processes: all three files or none.", TlsSection)
    http_tls: HttpTlsSection = section("Between clients and routers.", HttpTlsSection)


class Config(Section):
    """A cluster."""

    cluster: ClusterName = key("default", "Name of the cluster, one per user and name.")
    drain_s: float = key(30.0, "Seconds that running requests may take at a stop.", ge=0, le=3600)
    start_deadline_s: float = key(180.0, "Seconds that a start may take.", gt=0, le=86400)
    model: ModelSection = section("What is served.", ModelSection)
    pools: PoolsSection = section("The two pools of workers.", PoolsSection)
    worker: WorkerSection = section("Every worker, unless its pool says otherwise.", WorkerSection)
    kv: KvSection = section("The KV cache; the same in the whole cluster.", KvSection)
    speculation: SpeculationSection = section(
        "Speculative decoding, on decode workers; the text is the same.", SpeculationSection
    )
    router: RouterSection = section("The router.", RouterSection)
    autoscaler: AutoscalerSection = section(
        "Numbers of workers that follow the traffic.", AutoscalerSection
    )
    limits: LimitsSection = section("What a client can ask for.", LimitsSection)
    redis: RedisSection = section("Where workers and routers find each other.", RedisSection)
    security: SecuritySection = section("Who may connect, and how.", SecuritySection)
