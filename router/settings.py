"""What a router must be told."""

from __future__ import annotations

import msgspec


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
    adds_request_id: bool = True  # False where the proxy in front adds x-request-id itself

    def __repr__(self) -> str:
        return f"RouterSettings(cluster={self.cluster!r}, model_id={self.model_id!r}, ...)"
