"""API keys and their tenants. Tenants do not share cached prefixes.

``read_tenants`` reads the file at the router's start: a YAML (or JSON) mapping from keys to
tenants. A key is written as it is, or as ``sha256:<64 hex digits>``.

    sk-alpha: acme
    sha256:2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683:
      tenant: umbrella
      priority: 10          # most urgent priority that it may ask for; 0 by default
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from protocol.errors import StartupError
from protocol.requests import PRIORITIES
from protocol.security.tls import check_private
from router.common.errors import unauthorized
from router.tenants.tenant import DEFAULT_PRIORITY, DEFAULT_TENANT, Tenant

_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})\Z")


class Tenants:
    """Tenants by the digest of their keys. None: no key is required, and any key is accepted."""

    def __init__(self, by_digest: Mapping[bytes, Tenant] | None) -> None:
        self._by_digest = by_digest

    def authenticate(self, authorization: str | None) -> Tenant:
        """Return the tenant of an ``Authorization`` header. Raises ApiError (401)."""
        if self._by_digest is None:
            return DEFAULT_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise unauthorized(
                "no API key was provided: send it as 'Authorization: Bearer YOUR_KEY'"
            )
        given = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for (
            digest,
            tenant,
        ) in self._by_digest.items():  # all of them, so that the time does not depend on the key
            if hmac.compare_digest(given, digest):
                found = tenant
        if found is None:
            # litellm recognises an AuthenticationError by OpenAI's words.
            raise unauthorized("Incorrect API key provided: it is not known here")
        return found


def read_tenants(path: str | None) -> Tenants:
    """Read the file of API keys. Raises StartupError for a file that is not valid."""
    if path is None:
        return Tenants(None)
    try:
        raw = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        # The message must not quote the text: it may be a key.
        kind = error.strerror if isinstance(error, OSError) else "it is not YAML"
        raise StartupError(f"cannot read API keys from {path}: {kind}") from None
    if not isinstance(raw, dict) or not raw:
        raise StartupError(f"{path} must map API keys to tenants, one key at least")
    tenants = {_digest(key, path): _tenant(entry, path) for key, entry in raw.items()}
    if not all(_DIGEST.match(key) for key in raw):
        check_private(path, "api_keys")
    return Tenants(tenants)


def _digest(key: Any, path: str) -> bytes:
    if not isinstance(key, str) or not key:
        raise StartupError(f"{path}: every key must be a string; put quotes around it")
    match = _DIGEST.match(key)
    if match is None and key.startswith("sha256:"):
        raise StartupError(f"{path}: after sha256: come 64 hex digits")
    return bytes.fromhex(match[1]) if match else hashlib.sha256(key.encode()).digest()


def _tenant(entry: Any, path: str) -> Tenant:
    fields = {"tenant": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or not fields.keys() <= {"tenant", "priority"}:
        raise StartupError(f"{path}: a key has a tenant, and perhaps a priority")
    name, priority = fields.get("tenant"), fields.get("priority", DEFAULT_PRIORITY)
    if not isinstance(name, str) or not name:
        raise StartupError(f"{path}: a tenant's name is a string")
    low, high = PRIORITIES
    if type(priority) is not int or not low <= priority <= high:
        raise StartupError(f"{path}: priority of {name} must be an integer in [{low}, {high}]")
    return Tenant(name, priority)
