"""The exporter: what a collector gets, and what a collector that fails costs."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from router.observation import otlp_exporter
from router.observation.otlp_exporter import OtlpExporter
from router.observation.spans import AttributeValue, Span
from tests.router.observation.collector import Collector, attributes, running_collector


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(otlp_exporter, "BATCH_S", 0.0)
    with running_collector() as running:
        yield running


def span(name: str = "POST /v1/completions") -> Span:
    values: dict[str, AttributeValue] = {"text": "é", "count": 7, "share": 0.5}
    return Span(b"t" * 16, b"s" * 8, b"p" * 8, name, True, 1_000, 2_000, values)


def started(url: str) -> OtlpExporter:
    exporter = OtlpExporter(url, {"service.name": "baton-router"})
    exporter.start()
    return exporter


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "baton.traces"]


@pytest.mark.parametrize("tail", ["", "/", "/prefix"])
def test_spans_reach_the_collector(collector: Collector, tail: str) -> None:
    exporter = started(collector.url + tail)
    exporter.submit([span(), span("choice")._replace(is_server=False, failed=True, parent_id=b"")])
    collector.wait()
    exporter.close()
    assert collector.paths == [tail.rstrip("/") + "/v1/traces"]
    resource = collector.exports[0].resource_spans[0].resource
    assert [(a.key, a.value.string_value) for a in resource.attributes] == [
        ("service.name", "baton-router")
    ]
    server, choice = collector.spans
    assert (server.trace_id, server.span_id, server.parent_span_id) == (
        *(b"t" * 16, b"s" * 8, b"p" * 8),
    )
    assert (server.start_time_unix_nano, server.end_time_unix_nano) == (1_000, 2_000)
    assert attributes(server) == {"text": "é", "count": 7, "share": 0.5}
    assert (server.kind, choice.kind) == (server.SPAN_KIND_SERVER, server.SPAN_KIND_INTERNAL)
    assert (server.status.code, choice.status.code) == (0, choice.status.STATUS_CODE_ERROR)


def test_what_waits_is_exported_at_the_end(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp_exporter, "BATCH_S", 60.0)
    exporter = OtlpExporter(collector.url, {})
    for number in range(10):
        exporter.submit([span(str(number))])
    exporter.start()
    exporter.close()
    assert len(collector.exports) == 1
    assert [s.name for s in collector.spans] == [str(number) for number in range(10)]


@pytest.mark.parametrize("failure", ["status", "redirect", "garbage", "hang-up"])
def test_a_collector_that_fails_costs_its_batches_only(
    collector: Collector, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    answers = {
        "status": (503, b""),
        "redirect": (302, b""),
        "garbage": (200, b"SSH-2.0-OpenSSH_9.6\r\n"),
        "hang-up": (200, b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"),
    }
    collector.status, collector.raw = answers[failure]
    exporter = started(collector.url)
    for _ in range(2):
        exporter.submit([span()])
        collector.wait()
    collector.status, collector.raw = 200, b""
    exporter.submit([span("later")])
    collector.wait()
    exporter.close()
    if failure != "hang-up":  # there the spans may have been taken
        assert (exporter.dropped, [s.name for s in collector.spans]) == (2, ["later"])
        first, last = messages(caplog)
        assert first.startswith("traces are dropped: an export failed: ")
        assert last == "traces are exported again; 2 requests are lost"


def test_a_collector_that_is_not_there_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        exporter = OtlpExporter(f"http://127.0.0.1:{free.getsockname()[1]}", {})
        exporter.submit([span()])
        exporter.start()
        exporter.close()
    assert exporter.dropped == 1
    assert len(messages(caplog)) == 1 and "Connection refused" in messages(caplog)[0]


def test_a_collector_that_hangs_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp_exporter, "BATCH_S", 0.0)
    monkeypatch.setattr(otlp_exporter, "QUEUE_REQUESTS", 5)
    monkeypatch.setattr(otlp_exporter, "_CLOSE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, answers nothing
        exporter = started(f"http://127.0.0.1:{server.getsockname()[1]}")
        for _ in range(100):
            exporter.submit([span()])
        assert exporter.dropped >= 90
        exporter.close()
        assert exporter._thread.is_alive() and exporter._thread.daemon
    exporter._thread.join(10)  # the connection is reset
    assert not exporter._thread.is_alive()
    assert messages(caplog)[0].startswith("traces are dropped: ")
