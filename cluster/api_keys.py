"""API keys: drawn here, known to a router by their digests (router/tenants.py)."""

from __future__ import annotations

import hashlib
import json
import secrets


def draw() -> str:
    """A new key; its owner alone should have it."""
    return f"sk-{secrets.token_urlsafe(32)}"


def line(key: str, tenant: str) -> str:
    """The line that a file of keys has for it."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}: {json.dumps(tenant)}"
