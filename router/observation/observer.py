"""``RequestObserver``: writes each HTTP request to the access log and exports its spans.

``RouterState`` has one where either is configured; ``RequestEdge`` calls it.
"""

from __future__ import annotations

import time

from starlette.types import Scope

from router.common.json_lines_log import JsonLinesLog
from router.observation.access_log import access_line, open_access_log
from router.observation.otlp_exporter import OtlpExporter
from router.observation.request_record import RequestRecord, parse_traceparent
from router.observation.spans import request_spans

TRACED_PATHS = "/v1/"
"""Requests under this prefix are traced; those of monitoring are not."""


class RequestObserver:
    """The observer of one router: start -> begin, end for each request -> close."""

    def __init__(self, log: JsonLinesLog | None, exporter: OtlpExporter | None) -> None:
        self._log = log
        self._exporter = exporter

    @property
    def dropped(self) -> dict[str, int]:
        """Return how many requests are missing in each export that is configured."""
        found = {}
        if self._log is not None:
            found["access_log"] = self._log.dropped
        if self._exporter is not None:
            found["traces"] = self._exporter.dropped
        return found

    def start(self) -> None:
        for part in (self._log, self._exporter):
            if part is not None:
                part.start()

    def close(self) -> None:
        """Write what waits. Takes a few seconds at most where a disk or the collector hangs."""
        for part in (self._log, self._exporter):
            if part is not None:
                part.close()

    def begin(self, scope: Scope, request_id: str) -> RequestRecord:
        """Return the record of a request that has come."""
        client = scope.get("client")
        traced = dict(scope["headers"]).get(b"traceparent", b"")
        return RequestRecord(
            request_id=request_id,
            method=scope["method"],
            path=scope["path"],
            client=client[0] if client else "",
            began=time.perf_counter(),
            began_ns=time.time_ns(),
            parent=parse_traceparent(traced.decode("latin-1")),
        )

    def end(self, record: RequestRecord, scope: Scope) -> None:
        """Report a request that has ended."""
        record.ended = time.perf_counter()
        record.route = getattr(scope.get("route"), "path", "")
        if self._log is not None:
            self._log.write(access_line(record))
        if self._exporter is not None and record.path.startswith(TRACED_PATHS):
            spans = request_spans(record)
            if spans:
                self._exporter.submit(spans)


def open_observer(
    access_log: str | None, otlp_endpoint: str | None, cluster: str, instance: str
) -> RequestObserver | None:
    """Return the observer that the settings ask for; None: no log and no traces.

    Raises StartupError for a file that cannot be opened.
    """
    if access_log is None and otlp_endpoint is None:
        return None
    exporter = None
    if otlp_endpoint is not None:
        resource = {
            "service.name": "baton-router",
            "service.namespace": cluster,
            "service.instance.id": instance,
        }
        exporter = OtlpExporter(otlp_endpoint, resource)
    return RequestObserver(None if access_log is None else open_access_log(access_log), exporter)
