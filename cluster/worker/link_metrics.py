"""Collects metrics of the links by which a worker receives KV; ``WorkerCollector`` yields them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from cluster.worker.metric_families import LABELS
from kvtransfer.links import LinkRow

PEER_CHARS = 12  # of the sending worker's instance id, as of ``replica``
REASON_CHARS = 160
MAX_LINKS = 128
"""Links on a page, so that pages of large clusters stay small; those with the most transfers."""


def link_metrics(rows: Sequence[LinkRow], labels: list[str]) -> Iterator[Metric]:
    """Yield the links of one worker; ``labels`` are model, role and replica.

    Of each sending worker there is the link that its last transfer has used, with the reason for
    the choice, and those that are avoided, with their last failure."""
    names = [*LABELS, "replica", "peer", "carrier"]
    text = "Best recent rate of the link that is used; 0: not measured yet"
    rates = GaugeMetricFamily("baton_kv_link_bytes_per_second", text, labels=[*names, "reason"])
    avoided = GaugeMetricFamily(
        "baton_kv_link_avoided_seconds", "Time until the link is tried again", labels=names
    )
    for row in sorted(rows, key=lambda row: -row.transfers)[:MAX_LINKS]:
        link = [*labels, row.instance[:PEER_CHARS], row.carrier]
        if row.chosen:
            rates.add_metric([*link, row.reason[:REASON_CHARS]], row.bytes_s)
        if row.avoided_s > 0:
            avoided.add_metric(link, row.avoided_s)
    yield from (rates, avoided)
