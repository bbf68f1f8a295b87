"""A collector of OpenTelemetry: a small HTTP server that decodes what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Exports that came; ``status`` is its answer to the next ones, ``raw`` replaces all of it."""

    def __init__(self) -> None:
        self.status = 200
        self.raw = b""
        self.exports: list[ExportTraceServiceRequest] = []
        self.paths: list[str] = []
        self.came = threading.Semaphore(0)
        self.url = ""

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for export in self.exports
            for group in export.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    def wait(self) -> None:
        """Wait for one more export."""
        assert self.came.acquire(timeout=10)

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["content-length"]))
        self.paths.append(handler.path)
        assert handler.headers["content-type"] == "application/x-protobuf"
        if self.status == 200 and not self.raw:
            self.exports.append(ExportTraceServiceRequest.FromString(body))
        if self.raw:
            handler.wfile.write(self.raw)
        else:
            handler.send_response(self.status)
            handler.send_header("location", "/elsewhere")
            handler.send_header("content-length", "0")
            handler.end_headers()
        self.came.release()


@contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.handle(self)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Span) -> dict[str, Any]:
    found = {}
    for attribute in span.attributes:
        value = attribute.value
        found[attribute.key] = getattr(value, value.WhichOneof("value") or "string_value")
    return found
