import io
from pathlib import Path

import pytest
from rich.console import Console

from cluster.local.start_report import (
    ClusterReady,
    StageDone,
    StageFailed,
    StageNote,
    StageStarted,
    StageWaiting,
    StartEvent,
    StartEventWriter,
    StartReporter,
    read_new_events,
)

EVENTS: list[StartEvent] = [
    StageStarted("redis"),
    StageNote("a [note]"),
    StageNote("loading 25%"),
    StageWaiting(("decode",), 3.0),
    StageDone("redis", "embedded"),
    ClusterReady("http://127.0.0.1:8000", "it's"),
    StageFailed("ray", "no room"),
]


def test_events_pass_through_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(b"")
    write = StartEventWriter(path)
    with path.open("rb") as stream:
        for event in EVENTS:
            write(event)
        with path.open("ab") as other:
            other.write(b'nonsense\n{"type": "note", "te')
        assert list(read_new_events(stream)) == EVENTS
        with path.open("ab") as other:
            other.write(b'xt": "late"}\n')
        assert list(read_new_events(stream)) == [StageNote("late")]


def test_plain_lines_when_not_a_terminal() -> None:
    out = io.StringIO()
    now = 0.0
    report = StartReporter(Console(file=out, soft_wrap=True), lambda: now)
    for event, at in zip(EVENTS, [1.0, 1.0, 1.0, 1.0, 3.5, 4.0, 4.0], strict=True):
        now = at
        report(event)
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["         a [note]", "redis    embedded  (2.5 s)"]
    assert lines[2] == "ready    4.0 s in all: redis 2.5, other 1.5"
    assert lines[-1] == "ray      failed: no room"
    assert "\x1b" not in out.getvalue()


def test_progress_is_sparse_when_not_a_terminal() -> None:
    out = io.StringIO()
    now = 0.0
    report = StartReporter(Console(file=out, soft_wrap=True), lambda: now)
    report(StageStarted("deploy"))
    for second in range(1, 31):
        now = float(second)
        report(StageNote(f"decode: loading weights {second * 3}%"))
        report(StageWaiting(("prefill", "decode"), 180.0 - second))
    lines = out.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0] == "         decode: loading weights 18%"
    report(StageNote("prefill: importing torch"))
    now += 6.0
    report(StageWaiting(("prefill", "decode"), 144.0))
    last = out.getvalue().splitlines()[-1].strip()
    assert last == (
        "waiting for prefill (importing torch), decode (loading weights 90%) (at most 144 s more)"
    )


def test_download_progress_is_shown() -> None:
    out = io.StringIO()
    now = 0.0
    report = StartReporter(Console(file=out, soft_wrap=True), lambda: now)
    now = 6.0
    report.download(1 << 30, 4 << 30)
    assert out.getvalue().strip() == "downloading the model: 1.0 GiB of 4.0 GiB 25%"


def test_on_a_terminal_progress_is_one_line_that_changes() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, highlight=False)
    report = StartReporter(console)
    report(StageStarted("deploy"))
    for percent in range(0, 100, 5):
        report(StageNote(f"decode: loading weights {percent}%"))
    report(StageWaiting(("decode",), 99.0))
    report(StageDone("deploy", "1 decode"))
    report.close()
    assert "loading weights 95%\n" not in out.getvalue()
    assert "deploy   1 decode" in out.getvalue()


def test_the_end_of_a_start_shows_page_status_and_how_to_stop() -> None:
    out = io.StringIO()
    report = StartReporter(Console(file=out, soft_wrap=True))
    report(ClusterReady("https://h:1", "m", ca="/c/ca.pem", cluster="other"))
    lines = out.getvalue().splitlines()
    assert "page     https://h:1/ui" in lines
    assert any(line.startswith("status") and line.endswith("--cluster other") for line in lines)
    assert any(line.startswith("stop") and "baton down" in line for line in lines)
    assert any("pip install openai" in line for line in lines)
    assert any("--cacert /c/ca.pem" in line for line in lines)


def test_a_wait_beyond_a_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    report = StartReporter(clock=iter(range(0, 1000, 10)).__next__)
    report(StageStarted("deploy"))
    report(StageWaiting(("decode",), 400.0, "replaced in 1 batch"))
    assert "waiting for decode (at most 400 s more: replaced in 1 batch)" in capsys.readouterr().out
