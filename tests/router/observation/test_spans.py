"""Spans of requests at a router with fake workers, as a collector gets them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from protocol.wire import wire_pb2 as pb
from router.observation import otlp_exporter
from tests.router.conftest import MODEL, Start
from tests.router.fake_worker import outputs
from tests.router.observation.collector import Collector, attributes, running_collector

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
EVENTS = ("prefill_queued", "prefill_started", "first_token", "kv_ready", "decode_started")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(otlp_exporter, "BATCH_S", 0.0)
    with running_collector() as running:
        yield running


async def with_times(request: pb.Request) -> AsyncIterator[pb.Output]:
    """A script: a worker that says when what happened, 1 ms after each other."""
    async for output in outputs(delay=0.01)(request):
        marks = [pb.Mark(event=event, seconds=i / 1e3) for i, event in enumerate(EVENTS)]
        output.timeline.extend(marks)
        yield output


async def completion(collector: Collector, start: Start, **headers: str) -> list[Span]:
    cluster = await start(with_times, otlp_endpoint=collector.url)
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 3, "stream": True}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    reply = await cluster.client.post("/v1/completions", json=body, headers=names)
    assert reply.status_code == 200
    collector.wait()
    return collector.spans


async def test_stages_of_a_request_are_spans(collector: Collector, start: Start) -> None:
    root, choice, *stages = await completion(collector, start, x_request_id="my-id")
    assert (root.name, choice.name) == ("POST /v1/completions", "choice")
    names = ["route", "queue", "prefill", "first_emit", "wire", "scatter", "decode"]
    assert [stage.name for stage in stages] == names
    spans = dict(zip(names, stages, strict=True))
    assert not root.parent_span_id and choice.parent_span_id == root.span_id
    assert {stage.parent_span_id for stage in stages} == {choice.span_id}
    assert {span.trace_id for span in (choice, *stages)} == {root.trace_id}
    assert len({span.span_id for span in (root, choice, *stages)}) == 9

    first_s = attributes(root)["baton.time_to_first_token_s"]
    ttft = ("route", "queue", "prefill", "first_emit")
    for before, after in zip(ttft, (*ttft[1:], "decode"), strict=True):
        assert spans[before].end_time_unix_nano == spans[after].start_time_unix_nano
    seconds = sum(
        spans[name].end_time_unix_nano - spans[name].start_time_unix_nano for name in ttft
    )
    assert seconds / 1e9 == pytest.approx(first_s, abs=1e-5)
    wire = spans["wire"]
    assert wire.end_time_unix_nano - wire.start_time_unix_nano == pytest.approx(1e6, abs=2e3)
    assert root.start_time_unix_nano <= choice.start_time_unix_nano
    assert choice.end_time_unix_nano <= root.end_time_unix_nano


async def test_attributes_say_what_was_served_and_by_which_workers(
    collector: Collector, start: Start
) -> None:
    root, choice, *_ = await completion(collector, start, x_request_id="my-id")
    found = attributes(root)
    assert found["baton.request_id"] == "my-id"
    assert found["http.route"] == found["url.path"] == "/v1/completions"
    assert (found["http.request.method"], found["http.response.status_code"]) == ("POST", 200)
    assert found["gen_ai.response.id"].startswith("cmpl-")
    assert found["gen_ai.usage.output_tokens"] == 3 and found["baton.outcome"] == "ok"
    assert set(found) >= {"gen_ai.usage.input_tokens", "baton.cached_tokens", "baton.tenant"}
    placed = attributes(choice)
    assert placed["baton.attempts"] == 1
    assert placed["baton.decode_worker"] == placed["baton.prefill_worker"]
    resource = collector.exports[0].resource_spans[0].resource
    named = {a.key: a.value.string_value for a in resource.attributes}
    assert named["service.name"] == "baton-router" and named["service.namespace"] == "test"


async def test_the_span_of_the_caller_is_the_parent(collector: Collector, start: Start) -> None:
    spans = await completion(collector, start, traceparent=f"00-{TRACE}-{SPAN}-01")
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert spans[0].parent_span_id.hex() == SPAN


async def test_what_the_caller_does_not_sample_is_not_exported(
    collector: Collector, start: Start
) -> None:
    cluster = await start(outputs(), otlp_endpoint=collector.url)
    for flags in ("00", "01"):
        traced = {"traceparent": f"00-{TRACE}-{SPAN}-{flags}", "x-request-id": flags}
        await cluster.client.get("/v1/models", headers=traced)
    collector.wait()
    assert [attributes(span)["baton.request_id"] for span in collector.spans] == ["01"]


async def test_names_of_spans_do_not_hold_what_clients_invent(
    collector: Collector, start: Start
) -> None:
    cluster = await start(otlp_endpoint=collector.url)
    await cluster.client.get("/health")  # is not traced
    for path, status, name in (
        ("/v1/models/mine", 404, "GET /v1/models/{name:path}"),
        ("/v1/" + "x" * 999, 404, "GET"),
    ):
        assert (await cluster.client.get(path)).status_code == status
        collector.wait()
        span = collector.spans[-1]
        assert span.name == name
        assert attributes(span)["url.path"] == path[:200]
        assert span.status.code == span.status.STATUS_CODE_UNSET
    assert len(collector.spans) == 2


async def test_errors_of_the_server_are_marked(collector: Collector, start: Start) -> None:
    cluster = await start(outputs(error_after=2, retryable=False), otlp_endpoint=collector.url)
    reply = await cluster.post(prompt="hi", max_tokens=9, stream=True)
    collector.wait()
    root, choice, *_ = collector.spans
    assert reply.status_code == 200 == attributes(root)["http.response.status_code"]
    assert attributes(root)["baton.outcome"] == "500"
    assert root.status.code == root.status.STATUS_CODE_ERROR
    assert choice.status.code == choice.status.STATUS_CODE_UNSET


async def test_many_choices_have_a_bounded_number_of_spans(
    collector: Collector, start: Start
) -> None:
    cluster = await start(outputs(), otlp_endpoint=collector.url)
    await cluster.post(prompt=["hi"] * 8, n=8, max_tokens=1)
    collector.wait()
    assert sum(span.name == "choice" for span in collector.spans) == 16
