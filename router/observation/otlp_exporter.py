"""``OtlpExporter``: sends spans to an OpenTelemetry collector (OTLP over HTTP, protobuf).

    spans --submit--> queue (QUEUE_REQUESTS) --thread, every BATCH_S--> POST ENDPOINT/v1/traces

The event loop never waits: a full queue, and a batch that the collector does not take, are dropped
and counted. Nothing of OpenTelemetry is imported before the first exporter is made: the messages
come from ``opentelemetry-proto``, which Ray needs in any case.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from typing import TYPE_CHECKING

from router.observation.spans import AttributeValue, Span

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue
    from opentelemetry.proto.trace.v1 import trace_pb2

log = logging.getLogger("baton.traces")

QUEUE_REQUESTS = 2048
BATCH_REQUESTS = 256
BATCH_S = 1.0
TIMEOUT_S = 10.0
"""Seconds that a collector has for each step of taking a batch, such as its answer."""

_ANSWER_BYTES = 65_536
_CLOSE_S = 2.0
_SCOPE = "baton.router"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: urllib would turn the POST into a GET without spans."""

    def redirect_request(self, *_: object) -> None:
        return None


class OtlpExporter:
    """The exporter of one router: created -> start -> submit for each request -> close.

    ``endpoint``: the collector's URL, http or https. ``resource``: attributes of the process, such
    as ``service.name``.
    """

    def __init__(self, endpoint: str, resource: Mapping[str, AttributeValue]) -> None:
        self.dropped = 0  # requests whose spans were not exported
        self._url = endpoint.rstrip("/") + "/v1/traces"
        self._resource = resource
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._requests: queue.Queue[Sequence[Span] | None] = queue.Queue(QUEUE_REQUESTS)
        self._thread = threading.Thread(target=self._export, name="traces", daemon=True)
        self._fails = False  # the last batch was dropped, and that was logged
        encode_spans([], resource)  # imports what it needs, before requests come

    def start(self) -> None:
        self._thread.start()

    def submit(self, spans: Sequence[Span]) -> None:
        """Export the spans of a request soon, or drop them where too many wait."""
        try:
            self._requests.put_nowait(spans)
        except queue.Full:
            self._drop(1, "spans were exported faster than the collector accepts them")

    def close(self) -> None:
        """Export what waits, for ``_CLOSE_S`` at most."""
        while True:
            try:
                self._requests.put_nowait(None)
                break
            except queue.Full:
                with suppress(queue.Empty):
                    self._requests.get_nowait()
                    self.dropped += 1
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)

    def _export(self) -> None:
        is_open = True
        while is_open:
            batch, is_open = self._take_batch()
            if batch:
                self._send(batch)

    def _take_batch(self) -> tuple[list[Sequence[Span]], bool]:
        """Return what comes within ``BATCH_S`` of the first request, and whether more may come."""
        batch: list[Sequence[Span]] = []
        item = self._requests.get()
        until = time.monotonic() + BATCH_S
        while item is not None:
            batch.append(item)
            left_s = until - time.monotonic()
            if len(batch) >= BATCH_REQUESTS or left_s <= 0:
                return batch, True
            try:
                item = self._requests.get(timeout=left_s)
            except queue.Empty:
                return batch, True
        return batch, False

    def _send(self, batch: Sequence[Sequence[Span]]) -> None:
        headers = {"content-type": "application/x-protobuf", "user-agent": "baton"}
        try:
            body = encode_spans([span for spans in batch for span in spans], self._resource)
            request = urllib.request.Request(self._url, body, headers)
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                answer.read(_ANSWER_BYTES)
        except (OSError, ValueError, HTTPException) as error:
            reason = str(error) or type(error).__name__
            self._drop(len(batch), f"an export failed: {reason[:200]}")
        else:
            if self._fails:
                log.warning("traces are exported again; %d requests are lost", self.dropped)
            self._fails = False

    def _drop(self, requests: int, reason: str) -> None:
        self.dropped += requests
        if not self._fails:
            self._fails = True
            log.error("traces are dropped: %s", reason)


def encode_spans(spans: Iterable[Span], resource: Mapping[str, AttributeValue]) -> bytes:
    """Return the bytes of an ExportTraceServiceRequest."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
    )

    message = ExportTraceServiceRequest()
    group = message.resource_spans.add()
    group.resource.attributes.extend(_attributes(resource))
    scope = group.scope_spans.add()
    scope.scope.name = _SCOPE
    scope.spans.extend([_wire_span(span) for span in spans])
    return message.SerializeToString()


def _wire_span(span: Span) -> trace_pb2.Span:
    from opentelemetry.proto.trace.v1 import trace_pb2

    kinds = trace_pb2.Span.SpanKind
    wire = trace_pb2.Span(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_id,
        name=span.name,
        kind=kinds.SPAN_KIND_SERVER if span.is_server else kinds.SPAN_KIND_INTERNAL,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=_attributes(span.attributes),
    )
    if span.failed:
        wire.status.code = trace_pb2.Status.STATUS_CODE_ERROR
    return wire


def _attributes(values: Mapping[str, AttributeValue]) -> list[KeyValue]:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

    found = []
    for name, value in values.items():
        if isinstance(value, str):
            wire = AnyValue(string_value=value)
        elif isinstance(value, int):
            wire = AnyValue(int_value=value)
        else:
            wire = AnyValue(double_value=value)
        found.append(KeyValue(key=name, value=wire))
    return found
