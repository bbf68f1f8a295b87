"""Served models as Anthropic's ``GET /v1/models`` lists them, for clients that send
``anthropic-version``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

VERSION_HEADER = "anthropic-version"


def model_entry(name: str, created: int) -> dict[str, Any]:
    """Return one model; ``created``: seconds since the epoch."""
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": at}


def model_page(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the page that holds all models."""
    ids = [entry["id"] for entry in entries]
    return {
        "data": list(entries),
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }
