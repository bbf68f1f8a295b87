"""What a router must be told."""

from __future__ import annotations

import time

import msgspec

from protocol.endpoints.grpc_endpoints import join
from protocol.errors import StartupError
from protocol.registry.directory import check_url
from protocol.registry.redis_access import check_exposure
from protocol.security.cluster_token import check_http_bind
from protocol.security.tls import HttpTls, TlsFiles, http_context, read
from router.placement.admission import Patience
from router.placement.policies import PolicyName
from router.placement.snapshot import Objectives


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one router. Picklable: with Ray Serve they travel to the replica."""

    cluster: str
    redis_url: str
    token: str  # cluster token, sent with every RPC
    secret: bytes  # cluster secret, root of the prefix-cache keys; at most 64 bytes
    model_path: str  # folder with tokenizer.json
    model_id: str
    request_timeout_s: float = 600.0
    first_token_timeout_s: float = 120.0
    resubmit_wait_s: float = 10.0  # how long an interrupted request waits for a decode worker
    client_buffer_tokens: int = 1024  # tokens a client may lag behind before it loses its request
    refresh_s: float = 0.5  # between two looks into the directory
    max_body_bytes: int = 8 * 1024 * 1024
    body_timeout_s: float = 30.0  # for a request's headers, and again for its body
    url: str = ""  # where clients reach it, for others to know
    metrics_host: str = "127.0.0.1"  # this router's own metrics, whoever shares its ingress
    metrics_port: int = 0  # 0: any free one
    routing_policy: PolicyName = "cost"
    ttft_slo_s: float = 2.0  # objectives: what placements are weighed by
    tpot_slo_s: float = 0.1
    admission_ttft_ms: float | None = None  # predicted TTFT at which to refuse; None: 10 * SLO
    admission_queue_ms: float | None = None  # predicted time in a queue, likewise; None: no bound
    max_requests: int = 1024  # in the router at once, of one priority
    api_keys: str | None = None  # file of API keys and tenants; None: one tenant, any key
    tls: TlsFiles | None = None  # to the workers
    http_tls: HttpTls | None = None  # to clients
    allow_plain_http: bool = False  # beyond loopback: a proxy in front speaks TLS

    @property
    def goals(self) -> Objectives:
        return Objectives(self.ttft_slo_s, self.tpot_slo_s)

    @property
    def ttft_deadline_s(self) -> float:
        if self.admission_ttft_ms is None:
            return 10 * self.ttft_slo_s
        return self.admission_ttft_ms / 1000

    @property
    def patience(self) -> Patience:
        """Of a request that brings no deadline of its own."""
        if self.admission_queue_ms is None:
            return Patience(self.ttft_deadline_s)
        return Patience(self.ttft_deadline_s, self.admission_queue_ms / 1000)

    def url_at(self, host: str, port: int) -> str:
        """Where clients reach it if it listens there."""
        return f"{'http' if self.http_tls is None else 'https'}://{join(host, port)}"

    def check(self) -> None:
        """Raises StartupError for what cannot work."""
        check_url(self.redis_url)
        check_exposure(self.redis_url)
        if self.tls is not None:
            read(self.tls, time.time())
        if self.http_tls is not None:
            http_context(self.http_tls)
        for name in (
            *("ttft_slo_s", "tpot_slo_s", "ttft_deadline_s", "admission_queue_ms"),
            "max_requests",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise StartupError(f"{name} must be above 0 and finite, not {value}")

    def check_host(self, host: str) -> None:
        """Raises StartupError for a host that HTTP may not be served on, as things stand."""
        check_http_bind(
            host,
            api_keys=self.api_keys is not None,
            tls=self.http_tls is not None,
            allow_plain_http=self.allow_plain_http,
        )

    def __repr__(self) -> str:
        return f"RouterSettings(cluster={self.cluster!r}, model_id={self.model_id!r}, ...)"
