"""The links by which one worker receives KV, in an overview."""

from __future__ import annotations

import msgspec

from router.overview.prometheus_text import MetricsPage

_RATE = "baton_kv_link_bytes_per_second"
_AVOIDED = "baton_kv_link_avoided_seconds"


class LinkView(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker receives KV from another one (``peer``, the start of its instance id).

    ``reason``: why this carrier was chosen; ``best`` if no better one is there."""

    peer: str
    carrier: str
    reason: str
    bytes_per_s: float | None = None  # best recent rate; None: not measured yet
    avoided: list[str] = []  # carriers that have failed and are not tried now


def link_views(page: MetricsPage) -> list[LinkView]:
    """Return the links of the worker whose metrics are on ``page``, by peer."""
    avoided: dict[str, list[str]] = {}
    for sample in page.get(_AVOIDED, ()):
        avoided.setdefault(sample.labels.get("peer", ""), []).append(
            sample.labels.get("carrier", "")
        )
    found = [
        LinkView(
            peer=sample.labels.get("peer", ""),
            carrier=sample.labels.get("carrier", ""),
            reason=sample.labels.get("reason", ""),
            bytes_per_s=sample.value or None,
            avoided=sorted(avoided.get(sample.labels.get("peer", ""), [])),
        )
        for sample in page.get(_RATE, ())
    ]
    return sorted(found, key=lambda view: view.peer)
