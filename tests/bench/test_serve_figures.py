"""What the load generator makes of its records: pure functions, with figures worked out by hand."""

from __future__ import annotations

import io
import json
from array import array
from pathlib import Path

import pytest
from rich.console import Console

from bench.serve.figures import Objectives, quantiles, summarise
from bench.serve.health import health
from bench.serve.options import Options
from bench.serve.page import page
from bench.serve.records import Record
from bench.serve.result import Result, Said, read, result, write
from bench.serve.show import comparison, print_comparison, print_result
from bench.serve.stream import MalformedStream, Stream, said
from bench.serve.timeline import step, timeline
from protocol.errors import StartupError


def _record(index: int, due: float, times: list[float], **more: object) -> Record:
    fields: dict[str, object] = {
        "sent": due + 0.01,
        "ended": times[-1] if times else due + 1,
        "status": 200,
        "error": "",
        "output_counted": len(times),
    }
    made = Record(index, due, 100, len(times), times=array("d", times))
    for name, value in (fields | more).items():
        setattr(made, name, value)
    return made


RECORDS = [
    _record(0, 0.0, [0.1, 0.2, 0.3]),
    _record(1, 1.0, [1.5, 1.6, 2.0], prompt_counted=120, cached=30),
    _record(2, 2.0, [2.1], sent=2.0),
    _record(3, 3.0, [], error="HTTP 500", message="[red]no[/]", ended=3.5),
    _record(4, 4.0, [4.1], error="interrupted", ended=5.0),
]


def test_quantiles_are_by_nearest_rank() -> None:
    found = quantiles([float(v) for v in range(1, 101)])
    assert found is not None
    assert (found.p50, found.p90, found.p95, found.p99, found.most) == (50, 90, 95, 99, 100)
    assert found.mean == 50.5
    assert quantiles([]) is None


def test_a_summary_by_hand() -> None:
    s = summarise(RECORDS, Objectives(ttft_ms=200, tpot_ms=150), open_loop=True)
    assert (s.requests, s.ok, s.interrupted, s.errors) == (5, 3, 1, {"HTTP 500": 1})
    assert s.span_s == 5.0
    assert s.offered_rate == pytest.approx(1.0)
    assert s.achieved_rate == pytest.approx(3 / 5)
    assert s.output_tokens_per_s == pytest.approx(7 / 5)
    assert s.latencies["ttft_ms"].most == pytest.approx(500)
    assert s.latencies["ttft_from_sent_ms"].most == pytest.approx(490)
    assert s.latencies["tpot_ms"].count == 2  # one token has none
    assert s.latencies["tpot_ms"].most == pytest.approx(250)
    assert s.latencies["itl_ms"].count == 4
    assert s.latencies["itl_ms"].most == pytest.approx(400)
    assert s.goodput == pytest.approx(2 / 5)
    assert s.good_share == pytest.approx(2 / 4)
    assert s.cached_share == pytest.approx(30 / 120)
    assert s.messages == {"HTTP 500": "[red]no[/]"}


def test_no_objectives_no_goodput() -> None:
    s = summarise(RECORDS, Objectives(), open_loop=False)
    assert s.goodput is None
    assert s.offered_rate is None


def test_a_run_without_records_has_figures() -> None:
    s = summarise([], Objectives(ttft_ms=1), open_loop=True)
    assert (s.requests, s.achieved_rate, s.latencies) == (0, 0.0, {})
    assert timeline([]).in_flight == [0.0]


def test_tokens_that_come_together_are_one_arrival() -> None:
    record = Record(0, 0.0, 1, 8)
    stream = Stream(record)
    for at, ids in ((1.0, [1, 2]), (1.5, [3, 4, 5]), (2.5, [6])):
        chunk = json.dumps({"choices": [{"text": "", "token_ids": ids}]}).encode()
        stream.feed(b"data: " + chunk + b"\r\n\r\n", at)
    assert (record.output, list(record.counts)) == (6, [2, 3, 1])
    assert list(record.gaps) == [0.5, 1.0]
    assert record.tpot == pytest.approx(1.5 / 5)


def test_a_stream_may_be_cut_anywhere() -> None:
    chunks = (
        b'{"choices":[{"delta":{"role":"assistant","content":""}}]}',
        b'{"choices":[{"delta":{"content":"a"}}]}',
        b'{"choices":[{"delta":{},"finish_reason":"stop"}],"usage":null}',
        b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":4}}',
        b"[DONE]",
    )
    whole = b": alive\n\nevent: x\n" + b"".join(b"data: %b\n\n" % chunk for chunk in chunks)
    for size in (1, 7, len(whole)):
        record = Record(0, 0.0, 1, 4)
        stream = Stream(record)
        for i in range(0, len(whole), size):
            stream.feed(whole[i : i + size], float(i))
        assert (stream.done, stream.finished, len(record.times)) == (True, True, 1)
        assert (record.output, record.prompt_counted) == (4, 5)


@pytest.mark.parametrize(
    "data", [b"{", b"[]", b'{"choices": 3}', b"\xff", b'{"choices":[{"text":1}]}']
)
def test_what_is_no_chunk_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedStream):
        Stream(Record(0, 0.0, 1, 1)).feed(b"data: " + data + b"\n\n", 0.0)


def test_an_endless_line_is_malformed() -> None:
    stream = Stream(Record(0, 0.0, 1, 1))
    with pytest.raises(MalformedStream, match="more than"):
        for _ in range(6):
            stream.feed(b"x" * (1 << 20), 0.0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no\\nway"}}', "no way"),
        (b'{"message": "bare"}', "bare"),
        (b'{"error": "a string"}', '{"error": "a string"}'),
        (b"<html>\x1b[31m\xff", "<html> [31m\ufffd"),
        (b"x" * 999, "x" * 200),
    ],
)
def test_what_a_server_says_is_one_printable_line(body: bytes, message: str) -> None:
    assert said(body) == message


def test_the_generator_tells_on_itself() -> None:
    late = [_record(i, 0.0, [1.0], sent=0.05) for i in range(10)]
    held = [_record(i, 0.0, [9.0], sent=5.0, held=True) for i in range(2)]
    found = health([*late, *held], cpu_s=9.5, wall_s=10.0, max_in_flight=10)
    assert found.lag_ms is not None
    assert found.lag_ms.most == pytest.approx(50)  # those held are counted apart
    assert [w.split()[:3] for w in found.warnings] == [
        ["the", "generator", "was"],
        ["the", "generator", "used"],
        ["2", "requests", "waited"],
    ]
    assert health(RECORDS, 0.1, 10.0, 10).warnings == []


def test_a_timeline_counts_everything_once() -> None:
    found = timeline(RECORDS)
    assert found.step_s == 0.5
    assert sum(found.completed) * found.step_s == pytest.approx(3)
    assert sum(found.failed) * found.step_s == pytest.approx(2)
    assert sum(found.output_tokens) * found.step_s == pytest.approx(8, abs=0.01)
    busy = sum(r.ended - r.sent for r in RECORDS)
    assert sum(found.in_flight) * found.step_s == pytest.approx(busy, abs=0.01)
    assert [step(s) for s in (1, 61, 130, 400, 3600)] == [0.5, 1.0, 2.0, 5.0, 50.0]


def _result(options: Options, keep: bool = False) -> Result:
    about = Said("2026-01-01T00:00:00+00:00", True, "m<script>", "ids", "exact")
    return result(options, about, RECORDS, health(RECORDS, 9.0, 10.0, 5), keep)


OPTIONS = Options(url="http://h", rate=2.0, ttft_slo_ms=200, tpot_slo_ms=150)


def test_a_result_is_read_as_written(tmp_path: Path) -> None:
    found = _result(OPTIONS, keep=True)
    write(tmp_path / "a.json", found)
    again = read(tmp_path / "a.json")
    assert again.summary == found.summary
    assert again.distributions == found.distributions
    assert again.records is not None
    assert again.records[1]["times"] == [1.5, 1.6, 2.0]
    for text in ("", "{}", '{"format": "other"}'):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(StartupError, match=r"b\.json is no result"):
            read(tmp_path / "b.json")


def test_a_result_on_a_terminal() -> None:
    out = Console(file=io.StringIO(), width=120)
    print_result(out, _result(OPTIONS))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "Interrupted" in text
    assert "[red]no[/]" in text  # what a server says is no markup
    assert "0.40 requests/s, 50.0% of the requests (TTFT <= 200 ms, TPOT <= 150 ms)" in text
    assert "warning: the generator used 90% of a core" in " ".join(text.split())


def test_results_beside_each_other() -> None:
    one, other = _result(OPTIONS), _result(Options(url="http://h", concurrency=2))
    rows = {row[0]: row[1:] for row in comparison([one, other])}
    assert rows["requests/s"] == ("0.60", "0.60", "+0.0%")
    assert rows["goodput, requests/s"] == ("0.40", "-", "-")
    out = Console(file=io.StringIO(), width=120)
    print_comparison(out, [one, other])
    assert "2 at a time" in out.file.getvalue()  # type: ignore[attr-defined]


def test_a_page_needs_nothing_from_outside() -> None:
    for results in ([_result(OPTIONS)], [_result(OPTIONS), _result(OPTIONS)]):
        text = page(results)
        own = text[: text.index("<script>")] + text[text.index("</head>") :]
        assert "default-src 'none'" in own
        assert "m<script>" not in own  # escaped, in plots, too
        assert "src=" not in own
        assert "<link" not in own
        for title in ("TTFT: distribution", "ITL: distribution", "In flight", "TTFT over time"):
            assert title in own
