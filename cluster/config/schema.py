"""The sections and keys of the configuration: the one place where a key is declared, with its
default, help and check. Flags, variables, the JSON schema and checks are derived from here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

from cluster.config import value_checks
from cluster.settings import AutoscalerMode
from engine.ipc.settings import MAX_DRAFT_TOKENS, SpeculationMethod
from engine.kv_cache.kv_format import Precision
from router.openai.parser_names import (
    GenerationConfigUse,
    ReasoningFields,
    ReasoningParserName,
    ToolParserName,
    UnknownFields,
)

FLAG = "x-flag"
NO_FLAG = ""
_MAX_WORKERS = 10_000  # of one pool

HttpUrl: TypeAlias = Annotated[SecretStr, AfterValidator(value_checks.http_url)]
ClusterName: TypeAlias = Annotated[str, AfterValidator(value_checks.cluster_name)]
Host: TypeAlias = Annotated[str, AfterValidator(value_checks.host)]
ModelNames: TypeAlias = Annotated[str, AfterValidator(value_checks.model_names)]
HostNames: TypeAlias = Annotated[str, AfterValidator(value_checks.host_names)]
CollectorUrl: TypeAlias = Annotated[str, AfterValidator(value_checks.collector_url)]
Origins: TypeAlias = Annotated[str, AfterValidator(value_checks.origins)]
DnsName: TypeAlias = Annotated[str, AfterValidator(value_checks.dns_name)]
Fabric: TypeAlias = Literal["untrusted", "trusted"]
Device: TypeAlias = Annotated[str, AfterValidator(value_checks.device)]
ModuleName: TypeAlias = Annotated[str, AfterValidator(value_checks.module_name)]
RedisUrl: TypeAlias = Annotated[SecretStr, AfterValidator(value_checks.redis_url)]
Token: TypeAlias = Annotated[SecretStr, AfterValidator(value_checks.token)]
HexSecret: TypeAlias = Annotated[SecretStr, AfterValidator(value_checks.hex_secret)]
FileName: TypeAlias = Annotated[str, "file"]
"""Path of a file that must exist; in a configuration file, relative to its folder."""


def key(default: object, text: str, flag: str | None = None, **bounds: Any) -> Any:
    """Declare a key with its help ``text``. ``flag`` None derives the flag from the key's name."""
    extra: dict[str, Any] | None = None if flag is None else {FLAG: flag}
    return Field(default, description=text, json_schema_extra=extra, **bounds)


def section(text: str, kind: type[BaseModel]) -> Any:
    """Declare a section within another one."""
    return Field(default_factory=kind, description=text)


class Section(BaseModel):
    """Base of all sections: frozen, without unknown keys, and without values in error messages."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False
    )


class AutoscalerSection(Section):
    """Its flags and variables begin with its name: ``--autoscaler-mode``."""

    mode: AutoscalerMode = key(
        "off", "off; advise: only log decisions; act: carry them out (see docs/operations.md)."
    )
    prometheus_url: HttpUrl | None = key(
        None,
        "URL of the Prometheus that scrapes the cluster; null: metrics are read from the"
        " processes.",
    )
    interval_s: float = key(5.0, "Seconds between two decisions.", ge=0.5, le=300)
    window_s: float = key(
        60.0,
        "Seconds until the first decision at most; later ones use up to 5 times as many.",
        ge=5,
        le=3600,
    )
    prefill_min: int = key(1, "Minimum number of prefill workers.", ge=0, le=_MAX_WORKERS)
    prefill_max: int = key(8, "Maximum number of prefill workers.", ge=0, le=_MAX_WORKERS)
    decode_min: int = key(1, "Minimum number of decode workers.", ge=1, le=_MAX_WORKERS)
    decode_max: int = key(8, "Maximum number of decode workers.", ge=1, le=_MAX_WORKERS)
    gpus: float | None = key(
        None, "Maximum number of workers together, each counted as one GPU; null: no limit.", gt=0
    )
    loans: bool = key(True, "Allow lending workers of one pool to the other.")
    loan_drain_s: float = key(
        2.0, "Seconds that a decode worker has to finish requests before it is lent.", ge=0, le=600
    )
    down_after_s: float | None = key(
        None,
        "Seconds for which workers must have been spare before some are stopped; null: as long as"
        " a start takes.",
        ge=1,
        le=86400,
    )
    down_every_s: float = key(
        20.0, "Seconds between two reductions of the number of workers.", ge=0, le=86400
    )
    warm_up_s: float = key(
        30.0, "Age in seconds from which a worker's speed is trusted.", ge=0, le=3600
    )
    start_s: float = key(
        60.0, "Seconds that a start is assumed to take, until one was observed.", gt=0, le=86400
    )
    log: str | None = key(
        None, "File of decisions as JSON lines; null: decisions.jsonl in the folder of the run."
    )


class ModelSection(Section):
    path: str | None = key(None, "Model folder or hub id; null: the demo model.", "--model")
    id: str | None = key(
        None, "Name of the model in the API; null: that of the folder or hub id.", "--model-id"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        None, "Data type of the computation; null: float32 on a CPU, bfloat16 on a GPU."
    )
    max_len: int | None = key(
        None, "Maximum context in tokens; null: that of the model.", "--max-model-len", ge=1
    )


class WorkerSection(Section):
    host: Host = key("127.0.0.1", "Address that workers listen on.", "--worker-host")
    device: Device | None = key(None, "cpu, cuda or cuda:N; null: a GPU where there is one.")
    gpu_share: float | None = key(
        None,
        "Share of a GPU's memory that a worker may use; null: all of it, and equal shares where"
        " Ray places several workers on a GPU.",
        gt=0,
        le=1,
    )
    threads: int | None = key(None, "CPU threads of each engine; null: chosen by the engine.", ge=1)
    kv_tokens: int | None = key(
        None, "Tokens in each worker's KV pool; null: chosen by the engine.", ge=32
    )
    max_batch: int | None = key(
        None, "Maximum number of sequences in a step; null: 64 on a CPU, 256 on a GPU.", ge=1
    )
    prefill_chunk: int | None = key(
        None,
        "Maximum number of prompt tokens in a step; null: 512 on a CPU, on a GPU 2048, and 4096"
        " on prefill workers.",
        ge=1,
    )
    step_budget_ms: float | None = key(
        None,
        "Maximum milliseconds of a step that delays streams by computing prompts; 0: no bound;"
        " null: on decode workers from the objectives and the measured steps, on prefill workers"
        " no bound.",
        ge=0,
    )
    batch_invariant: bool = key(
        False,
        "On a GPU, compute every decode step with max_batch rows, so that a sequence's tokens do"
        " not depend on the other sequences that decode.",
    )
    peak_tflops: float | None = key(
        None, "Maximum TFLOP/s of a worker; null: measured at its start.", gt=0
    )
    peak_gb_per_s: float | None = key(
        None, "Maximum GB/s that a worker reads from memory; null: measured at its start.", gt=0
    )
    link_gb_per_s: float | None = key(
        None,
        "Maximum GB/s that a worker receives from the network; null: the best rate observed.",
        gt=0,
    )
    engine: ModuleName = key(
        "cluster.worker.engine_main",
        "Python module that runs as each engine's process.",
        "--worker-engine",
    )


class PoolSection(Section):
    workers: int = key(1, "Workers in the pool.", ge=0)
    threads: int | None = key(None, "Overrides worker.threads for this pool.", ge=1)
    kv_tokens: int | None = key(None, "Overrides worker.kv_tokens for this pool.", ge=32)
    max_batch: int | None = key(None, "Overrides worker.max_batch for this pool.", ge=1)
    prefill_chunk: int | None = key(None, "Overrides worker.prefill_chunk for this pool.", ge=1)
    step_budget_ms: float | None = key(None, "Overrides worker.step_budget_ms for this pool.", ge=0)


class PrefillPoolSection(PoolSection):
    workers: int = key(1, "Workers in the pool; 0: decode workers compute all prompts.", ge=0)


class DecodePoolSection(PoolSection):
    workers: int = key(1, "Workers in the pool.", ge=1)


class PoolsSection(Section):
    prefill: PrefillPoolSection = section(
        "Prefill workers; null: the value in worker.", PrefillPoolSection
    )
    decode: DecodePoolSection = section(
        "Decode workers; null: the value in worker.", DecodePoolSection
    )


class KvSection(Section):
    precision: Precision = key(
        "fp8",
        "exact: KV is stored and sent as computed; fp8: rounded, which saves memory and transfer.",
        "--kv-precision",
    )
    fabric: Fabric = key(
        "untrusted",
        "trusted: nobody else can read or change traffic between workers, so KV may be sent"
        " unencrypted and unauthenticated by the carrier nixl.",
    )


class SpeculationSection(Section):
    method: SpeculationMethod = key(
        "auto",
        "How tokens are drafted; auto: by the kind of model that is given, or ngram without a"
        " model.",
        "--speculation",
    )
    model: str | None = key(
        None,
        "Folder or hub id of a draft model, or of Medusa or EAGLE heads; null: the demo model "
        "brings its own, others have none.",
        "--speculation-model",
    )
    max_tokens: int = key(
        8,
        "Maximum number of tokens drafted for a sequence in a step; each step drafts as many as"
        " pay.",
        "--speculation-tokens",
        ge=1,
        le=MAX_DRAFT_TOKENS,
    )


class RouterSection(Section):
    host: Host = key("127.0.0.1", "Address that routers listen on for clients.")
    port: int = key(8000, "HTTP port; `baton up` takes the next free one.", ge=1, le=65535)
    replicas: int | None = key(
        None,
        "Routers, which share the port on one host; null: 1, and on a Ray cluster one for each"
        " node that takes routers.",
        "--routers",
        ge=1,
        le=1024,
    )
    metrics_host: Host = key(
        "127.0.0.1", "Address of the router's own metrics.", "--router-metrics-host"
    )
    metrics_port: int = key(
        0,
        "Port of the router's own metrics; 0: any free port.",
        "--router-metrics-port",
        ge=0,
        le=65535,
    )
    ttft_slo_ms: float = key(2000.0, "Objective: milliseconds to the first token.", ge=1)
    tpot_slo_ms: float = key(100.0, "Objective: milliseconds for each further token.", ge=1)
    admission_ttft_ms: float | None = key(
        None,
        "Refuse requests whose first token is predicted later than this; null: 20 times the"
        " objective (10 times, and a factor of 2 for wrong predictions).",
        ge=1,
    )
    admission_queue_ms: float | None = key(
        None,
        "Refuse requests that are predicted to queue longer; null: half the objective while an"
        " overload lasts, unless admission_ttft_ms is set.",
        ge=1,
    )
    usage_log: str | None = key(
        None,
        "File of the tenants' usage, a JSON line for each response; null: none.",
        "--usage-log",
    )
    access_log: str | None = key(
        None, "File of HTTP requests, a JSON line for each; null: none.", "--access-log"
    )
    otlp_endpoint: CollectorUrl | None = key(
        None, "OpenTelemetry collector that gets traces, such as http://localhost:4318; null: none."
    )


class ApiSection(Section):
    reasoning_parser: ReasoningParserName = key(
        "auto",
        "Format of the model's reasoning; auto: as in its chat template; none: the reasoning is"
        " part of the content.",
    )
    tool_parser: ToolParserName = key(
        "auto", "Format of the model's tool calls; auto: as in its chat template."
    )
    reasoning_field: ReasoningFields = key(
        "both", "Field of chat messages that contains the reasoning."
    )
    unknown_fields: UnknownFields = key(
        "ignore",
        "Unknown fields of a request; ignore: the response header x-baton-ignored names them.",
    )
    generation_config: GenerationConfigUse = key(
        "auto",
        "auto: requests without sampling parameters get those of the model's"
        " generation_config.json; none: the file is not used.",
    )
    model_aliases: ModelNames | None = key(
        None, "Comma-separated further names of the model in the API."
    )
    cors_origins: Origins | None = key(
        None,
        "Comma-separated origins whose web pages may call the API, such as https://chat.example;"
        " *: any; null: none.",
    )
    keep_alive_s: float = key(
        15.0,
        "Seconds without an event after which a stream gets a keep-alive event.",
        gt=0,
        le=300,
    )


class LimitsSection(Section):
    max_body_bytes: int = key(
        8 * 2**20, "Maximum size of a request's body in bytes.", ge=1024, le=2**30
    )
    body_timeout_s: float = key(
        30.0,
        "Maximum seconds until a request's headers are received, and again until its body is.",
        gt=0,
        le=3600,
    )
    max_requests: int = key(
        1024,
        "Maximum number of one tenant's requests in a router at once; four times as many of"
        " all tenants.",
        ge=1,
    )
    max_connections: int = key(
        8192,
        "Maximum number of clients' connections to a router; fewer where the limit of open files"
        " is low.",
        ge=8,
        le=2**20,
    )
    max_connections_per_address: int | None = key(
        None,
        "Maximum number of connections from one address (IPv6: one /64); null: three quarters of"
        " all, on loopback all.",
        ge=1,
    )
    idle_timeout_s: float = key(
        75.0, "Seconds after which a connection without a request is closed.", ge=1, le=3600
    )
    first_token_timeout_s: float = key(
        120.0, "Maximum seconds until a request's first token.", gt=0, le=3600
    )
    next_token_timeout_s: float = key(
        120.0, "Maximum seconds without a token, after which a request ends.", gt=0, le=3600
    )
    resubmit_wait_s: float = key(
        10.0,
        "Maximum seconds that an interrupted request waits for a decode worker.",
        gt=0,
        le=3600,
    )
    client_buffer_tokens: int = key(
        1024,
        "Maximum number of tokens that a client may lag behind before its request is cancelled.",
        ge=1,
    )


class RedisSection(Section):
    url: RedisUrl | None = key(
        None, "redis://, rediss:// or unix://; null: `baton up` starts one.", "--redis-url"
    )


class TlsSection(Section):
    name: DnsName | None = key(
        None, "DNS name in all certificates; null: the address of each node.", "--tls-name"
    )
    ca: FileName | None = key(None, "Certificate of the cluster's CA.", "--tls-ca")
    cert: FileName | None = key(None, "This node's certificate.", "--tls-cert")
    key: FileName | None = key(None, "Its private key.", "--tls-key")


class HttpTlsSection(Section):
    cert: FileName | None = key(None, "Certificate for HTTPS, with its chain.", "--http-tls-cert")
    key: FileName | None = key(None, "Its private key.", "--http-tls-key")


class SecuritySection(Section):
    api_keys: FileName | None = key(
        None,
        "YAML file of API keys and their tenants; null: no key is required, and all"
        " requests belong to one tenant.",
    )
    allow_plain_http: bool = key(
        False, "Allow HTTP beyond loopback, because a proxy in front terminates TLS."
    )
    allowed_hosts: HostNames | None = key(
        None,
        "Comma-separated names at which clients may reach a router, in addition to localhost and"
        " IP addresses; null: none without API keys, any with API keys.",
    )
    # These two have no flags, because every user of the machine can read command lines.
    token: Token | None = key(
        None,
        "Shared secret of all processes of the cluster; null: `baton up` generates one.",
        NO_FLAG,
    )
    secret: HexSecret | None = key(
        None,
        "Secret from which the keys of the prefix cache derive, in hex; null: `baton up`"
        " generates one.",
        NO_FLAG,
    )
    tls: TlsSection = section("Between Baton's processes: all three files or none.", TlsSection)
    http_tls: HttpTlsSection = section("Between clients and routers.", HttpTlsSection)


class Config(Section):
    """The configuration of a cluster."""

    cluster: ClusterName = key("default", "Name of the cluster, one per user and name.")
    drain_s: float = key(
        30.0, "Seconds that running requests have to finish when the cluster stops.", ge=0, le=3600
    )
    start_deadline_s: float = key(180.0, "Maximum seconds that a start may take.", gt=0, le=86400)
    model: ModelSection = section("The model that is served.", ModelSection)
    pools: PoolsSection = section("The two pools of workers.", PoolsSection)
    worker: WorkerSection = section(
        "All workers, unless their pool overrides a key.", WorkerSection
    )
    kv: KvSection = section("The KV cache, which is the same in the whole cluster.", KvSection)
    speculation: SpeculationSection = section(
        "Speculative decoding, on decode workers; the text is the same.", SpeculationSection
    )
    router: RouterSection = section("The router.", RouterSection)
    autoscaler: AutoscalerSection = section(
        "Adapts the numbers of workers to the traffic.", AutoscalerSection
    )
    api: ApiSection = section("The API for clients.", ApiSection)
    limits: LimitsSection = section("Limits for clients.", LimitsSection)
    redis: RedisSection = section(
        "The Redis through which workers and routers find each other.", RedisSection
    )
    security: SecuritySection = section("Certificates, API keys and secrets.", SecuritySection)


class RemovedKey(NamedTuple):
    """A key of an earlier version. A file, variable or flag that still sets it is refused."""

    name: str
    flag: str
    replacement: str

    @property
    def variable(self) -> str:
        """The environment variable that set the key."""
        return "BATON_" + self.flag.strip("-").replace("-", "_").upper()

    @property
    def text(self) -> str:
        """The mistake that the user reads."""
        return f"{self.name} is gone: {self.replacement}"


REMOVED_KEYS = (
    RemovedKey("kv.codec", "--kv-codec", "the codec follows from kv.precision"),
    RemovedKey("kv.pool", "--kv-pool", "the storage follows from kv.precision and the device"),
    RemovedKey(
        "router.policy", "--routing-policy", "routers always choose workers by their predicted cost"
    ),
    RemovedKey(
        "worker.local_prefill_tokens",
        "--local-prefill-tokens",
        "the router decides for each request where its prompt is computed",
    ),
)
