import io
from pathlib import Path

from rich.console import Console

from cluster.events import Began, Done, Event, Failed, Note, Ready, Writer, new_events
from cluster.report import Reporter, curl_command, python_snippet

EVENTS: list[Event] = [
    Began("redis"),
    Note("a [note]"),
    Note("loading 25%"),
    Done("redis", "embedded"),
    Ready("http://127.0.0.1:8000", "it's"),
    Failed("ray", "no room"),
]


def test_events_pass_through_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(b"")
    write = Writer(path)
    with path.open("rb") as stream:
        for event in EVENTS:
            write(event)
        with path.open("ab") as other:
            other.write(b'nonsense\n{"type": "note", "te')
        assert list(new_events(stream)) == EVENTS
        with path.open("ab") as other:
            other.write(b'xt": "late"}\n')
        assert list(new_events(stream)) == [Note("late")]


def test_plain_lines_when_not_a_terminal() -> None:
    out = io.StringIO()
    times = iter([0.0, 1.0, 3.5, 4.0])
    report = Reporter(Console(file=out, soft_wrap=True), lambda: next(times))
    for event in EVENTS:
        report(event)
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["         a [note]", "redis    embedded  (2.5 s)"]
    assert lines[2] == "ready    4.0 s in all"
    assert lines[-1] == "ray      failed: no room"
    assert "\x1b" not in out.getvalue()


def test_what_to_paste_is_quoted() -> None:
    assert "it'\\''s" in curl_command("http://u", "it's")
    compile(python_snippet("http://u", "it's"), "snippet", "exec")
