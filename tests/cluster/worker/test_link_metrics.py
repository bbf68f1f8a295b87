"""The metrics of links, and how an overview and `baton status` show them."""

from __future__ import annotations

import io
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from rich.console import Console

from cluster.cli.status_view import link_line
from cluster.worker.link_metrics import MAX_LINKS, link_metrics
from kvtransfer.links import LinkTable
from router.overview.link_view import LinkView, link_views
from router.overview.prometheus_text import parse_page

LABELS = ["demo", "decode", "d" * 12]


def views(table: LinkTable) -> list[LinkView]:
    class Links(Collector):
        def collect(self) -> Iterator[Metric]:
            return link_metrics(table.rows(), LABELS)

    registry = CollectorRegistry()
    registry.register(Links())
    return link_views(parse_page(generate_latest(registry).decode()))


def test_page_shows_choice_rate_and_reason() -> None:
    table = LinkTable(("local", "tcp", "grpc"))
    table.choose("a" * 32, "local", table.offers("a" * 32))
    table.measured("a" * 32, "local", 5e9)
    table.choose("b" * 32, "tcp", table.offers("b" * 32))
    near, far = views(table)
    assert near == LinkView(peer="a" * 12, carrier="local", reason="best", bytes_per_s=5e9)
    assert (far.carrier, far.bytes_per_s) == ("tcp", None) and "local" in far.reason


def test_page_shows_carriers_that_are_avoided() -> None:
    table = LinkTable(("tcp", "grpc"))
    table.choose("a" * 32, "tcp", table.offers("a" * 32))
    table.failed("a" * 32, "tcp", "no KV frame for 5 s")
    table.choose("a" * 32, "grpc", table.offers("a" * 32))
    (link,) = views(table)
    assert (link.carrier, link.avoided) == ("grpc", ["tcp"])
    assert "no KV frame for 5 s" in link.reason


def test_page_of_a_large_cluster_is_bounded() -> None:
    table = LinkTable(("grpc",))
    for number in range(MAX_LINKS + 50):
        table.choose(f"{number:032x}", "grpc", ["grpc"])
    assert len(views(table)) <= MAX_LINKS


def test_status_groups_links_by_carrier_and_reason() -> None:
    near = [
        LinkView(peer=f"{p}" * 12, carrier="local", reason="best", bytes_per_s=p * 1e9)
        for p in (1, 2)
    ]
    far = LinkView(peer="f" * 12, carrier="grpc", reason="tcp avoided: refused", avoided=["tcp"])
    out = io.StringIO()
    Console(file=out, width=120).print(link_line("d00d00", [*near, far]))
    assert "local 2.00 GB/s from 2 workers" in out.getvalue()
    assert "grpc from ffffff (tcp avoided: refused)" in out.getvalue()
