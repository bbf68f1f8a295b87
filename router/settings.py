"""``RouterSettings``: the settings of one router, made by ``cluster/config``."""

from __future__ import annotations

import time

import msgspec

from protocol.endpoints.grpc_endpoints import join_host_port
from protocol.registry.redis_client import check_exposure, check_url
from protocol.security.host_header import AllowedHosts
from protocol.security.listen_hosts import check_router_host
from protocol.security.tls import HttpTls, TlsFiles, https_server_context, read_pem_bundle
from router.openai.parser_names import (
    GenerationConfigUse,
    ReasoningFields,
    ReasoningParserName,
    ToolParserName,
    UnknownFields,
)
from router.placement.admission import AdmissionLimits, admission_limits
from router.placement.snapshot import Objectives


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one router. They can be pickled: Ray Serve sends them to the replica."""

    cluster: str
    redis_url: str
    token: str  # cluster token, sent with every RPC
    secret: bytes  # cluster secret, root of the prefix-cache keys; at most 64 bytes
    model_path: str  # folder with tokenizer.json
    model_id: str
    first_token_timeout_s: float
    next_token_timeout_s: float
    resubmit_wait_s: float  # how long an interrupted request waits for a decode worker
    client_buffer_tokens: int  # tokens a client may lag behind before it loses its request
    refresh_s: float = 0.5  # between two reads of the directory; has no key
    reasoning_parser: ReasoningParserName
    tool_parser: ToolParserName
    reasoning_field: ReasoningFields
    unknown_fields: UnknownFields  # of a body, at the top level
    generation_config: GenerationConfigUse
    model_aliases: tuple[str, ...]  # further names of the model
    cors_origins: tuple[str, ...] | None  # whose pages may call the API; "*": any; None: none
    keep_alive_s: float  # without an event, after which a stream gets one without meaning
    max_body_bytes: int
    body_timeout_s: float  # for a request's headers, and again for its body
    max_connections: int  # of clients, open at once; fewer where descriptors do not suffice
    max_connections_per_address: int | None  # None: three quarters of them; all on loopback
    idle_timeout_s: float  # from the end of a response to the next request of its connection
    allowed_hosts: tuple[str, ...] | None  # in the Host header; None: any, if there are API keys
    url: str = ""  # where clients reach the router, shown to others; known at the start
    metrics_host: str  # address of this router's own metrics, also where routers share a port
    metrics_port: int  # 0: any free one
    ttft_slo_s: float  # objectives that placements are weighed by
    tpot_slo_s: float
    admission_ttft_ms: float | None  # predicted TTFT at which to refuse; None: by the objective
    admission_queue_ms: float | None  # predicted time in a queue, likewise; None: see below
    max_requests: int  # in the router at once, of one tenant
    api_keys: str | None  # file of API keys and tenants; None: one tenant, any key
    usage_log: str | None  # file of tenants' usage, JSON lines; None: none
    access_log: str | None  # file of HTTP requests, JSON lines; None: none
    otlp_endpoint: str | None  # URL of an OpenTelemetry collector that gets traces; None: none
    tls: TlsFiles | None  # to the workers
    http_tls: HttpTls | None  # to clients
    allow_plain_http: bool  # beyond loopback: a proxy in front speaks TLS

    @property
    def goals(self) -> Objectives:
        return Objectives(self.ttft_slo_s, self.tpot_slo_s)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that clients may give the model, its own one first."""
        return tuple(dict.fromkeys((self.model_id, *self.model_aliases)))

    @property
    def admission_limits(self) -> AdmissionLimits:
        """Limits of a request without its own deadline."""
        given = self.admission_ttft_ms, self.admission_queue_ms
        ttft_s, queue_s = (None if ms is None else ms / 1000 for ms in given)
        return admission_limits(self.ttft_slo_s, ttft_s, queue_s)

    @property
    def checked_hosts(self) -> AllowedHosts | None:
        """The hosts that requests may name; None: any, because they need an API key."""
        if self.allowed_hosts is None and self.api_keys is not None:
            return None
        return AllowedHosts(self.allowed_hosts or ())

    def url_at(self, host: str, port: int) -> str:
        """Return the router's URL when it listens at this address."""
        return f"{'http' if self.http_tls is None else 'https'}://{join_host_port(host, port)}"

    def check(self) -> None:
        """Raises StartupError for settings that cannot work."""
        check_url(self.redis_url)
        check_exposure(self.redis_url)
        if self.tls is not None:
            read_pem_bundle(self.tls, time.time())
        if self.http_tls is not None:
            https_server_context(self.http_tls)

    def check_host(self, host: str) -> None:
        """Raises StartupError for a host on which these settings do not allow HTTP."""
        check_router_host(
            host,
            api_keys=self.api_keys is not None,
            tls=self.http_tls is not None,
            allow_plain_http=self.allow_plain_http,
        )

    def __repr__(self) -> str:
        return f"RouterSettings(cluster={self.cluster!r}, model_id={self.model_id!r}, ...)"
