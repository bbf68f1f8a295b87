"""Reports the progress of a start: events written by the supervisor, and lines for the terminal.

The supervisor and the replicas append events to events.jsonl, one JSON object per line
(``StartEventWriter``). `baton up` reads and prints them (``StartReporter``): one line per stage
with its time, and at the end commands to paste.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Self, TypeAlias, assert_never

import msgspec
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.status import Status

from cluster.local.start_snippets import baton_command, curl_command, python_snippet


class StageStarted(msgspec.Struct, frozen=True, tag="began"):
    """A stage has started; ``within_s`` is its own deadline, if it has one."""

    stage: str
    within_s: float | None = None


class StageNote(msgspec.Struct, frozen=True, tag="note"):
    """One line of text within the current stage."""

    text: str


class StageWaiting(msgspec.Struct, frozen=True, tag="waiting"):
    """The current stage still waits for ``names``, for at most ``left_s`` seconds. ``why`` says why
    that may be longer than a start."""

    names: tuple[str, ...]
    left_s: float
    why: str = ""


class StageDone(msgspec.Struct, frozen=True, tag="done"):
    """The stage has succeeded."""

    stage: str
    text: str = ""


class ClusterReady(msgspec.Struct, frozen=True, tag="ready"):
    """The cluster serves at ``url``. ``keys``: requests need an API key. ``ca``: file of the CA
    that clients must trust, if any. ``cluster``: its name, None if it is not on this machine."""

    url: str
    model_id: str
    keys: bool = False
    ca: str | None = None
    cluster: str | None = None


class StageFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The start has failed, and everything is being stopped."""

    stage: str
    reason: str


StartEvent: TypeAlias = (
    StageStarted | StageNote | StageWaiting | StageDone | ClusterReady | StageFailed
)

_decoder = msgspec.json.Decoder(StartEvent)


class StartEventWriter:
    """Appends events to a file, each by one write, so that lines of processes do not mix."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_cut = False  # the last line lacks its end

    def __call__(self, event: StartEvent) -> None:
        """Append an event. Raises OSError, also where a full disk takes only a part of it."""
        line = (b"\n" if self._is_cut else b"") + msgspec.json.encode(event) + b"\n"
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            self._is_cut = os.write(fd, line) < len(line)
        finally:
            os.close(fd)
        if self._is_cut:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))


def read_new_events(stream: BinaryIO) -> Iterator[StartEvent]:
    """Yield the events appended since the last call, and skip lines that cannot be decoded."""
    while True:
        start = stream.tell()
        line = stream.readline()
        if not line.endswith(b"\n"):
            stream.seek(start)
            return
        try:
            yield _decoder.decode(line)
        except msgspec.DecodeError:
            continue


ReportWaiting: TypeAlias = Callable[[StageWaiting], None]


class WaitReporter:
    """Reports what a wait loop waits for, once a second at most. ``end``: time.monotonic().
    ``why``: as in ``StageWaiting``."""

    def __init__(self, report: ReportWaiting, end: float, why: str = "") -> None:
        self._report = report
        self._end = end
        self._why = why
        self._reported_at = 0.0

    def __call__(self, names: Sequence[str]) -> None:
        now = time.monotonic()
        if now - self._reported_at >= 1.0:
            self._reported_at = now
            self._report(StageWaiting(tuple(names), max(0.0, self._end - now), self._why))


SPARSE_S = 5.0
"""Minimum time between two lines of progress when the output is not a terminal."""


class StartReporter:
    """Prints events. On a terminal the current stage has a spinner; elsewhere lines are plain.

    Each command creates one and closes it when the start is over."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._clock = clock
        self._began = clock()
        self._stage_began = self._began
        self._last_line_at = self._began
        self._stage_seconds: dict[str, float] = {}
        self._last_note: dict[str, str] = {}  # by the kind of replica
        self._status: Status | None = None

    def __call__(self, event: StartEvent) -> None:
        match event:
            case StageStarted(stage, within_s):
                self._stage_began = self._clock()
                self._spin(stage if within_s is None else f"{stage}, at most {within_s:.0f} s")
            case StageNote(text):
                self._note(text)
            case StageWaiting(names, left_s, why):
                self._progress(self._waiting_text(names, left_s, why))
            case StageDone(stage, text):
                self._spin(None)
                elapsed = self._stage_seconds[stage] = self._clock() - self._stage_began
                self._line(f"{stage:<8} {text}  ({elapsed:.1f} s)")
            case StageFailed(stage, reason):
                self._spin(None)
                self._line(f"{stage:<8} failed: {reason}", style="bold red")
            case ClusterReady():
                self._spin(None)
                self._ready(event)
            case _:
                assert_never(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, text: str) -> None:
        """Print one line, and stop the spinner."""
        self._spin(None)
        self._line(text)

    def show(self, what: RenderableType) -> None:
        """Print a table within the current stage."""
        self._console.print(Padding(what, (0, 0, 0, 9)), style="dim", soft_wrap=False)

    def download(self, done: int, total: int, to: str = "") -> None:
        """Report the progress of a model's download, in bytes. ``to``: the nodes, if not this."""
        percent = f" {100 * done // total}%" if total else ""
        of = f" of {format_size(total)}" if total else ""
        where = f" to {to}" if to else ""
        self._progress(f"downloading the model{where}: {format_size(done)}{of}{percent}")

    def close(self) -> None:
        self._spin(None)

    def _spin(self, stage: str | None) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if stage is not None and self._console.is_terminal:
            self._status = self._console.status(f"{stage} ...")
            self._status.start()

    def _note(self, text: str) -> None:
        source, _, message = text.partition(": ")
        self._last_note[source] = message
        if text.endswith("%"):
            self._progress(text)
        else:
            self._line(f"         {text}", style="dim")

    def _waiting_text(self, names: tuple[str, ...], left_s: float, why: str) -> str:
        last = self._last_note
        shown = [f"{name} ({last[name]})" if last.get(name) else name for name in names]
        return f"waiting for {', '.join(shown)} (at most {left_s:.0f} s more{why and f': {why}'})"

    def _progress(self, text: str) -> None:
        """Update the spinner; without a terminal print a line, at most every SPARSE_S seconds."""
        if self._status is not None:
            self._status.update(f"{text} ...")
        elif self._console.is_terminal:
            self._spin(text)
        elif self._clock() - self._last_line_at > SPARSE_S:
            self._line(f"         {text}")

    def _line(self, text: str, style: str | None = None) -> None:
        self._last_line_at = self._clock()
        self._console.print(text, style=style, markup=False)

    def _ready(self, ready: ClusterReady) -> None:
        url, model_id, keys, ca = ready.url, ready.model_id, ready.keys, ready.ca
        in_all = self._clock() - self._began
        other = in_all - sum(self._stage_seconds.values())
        stages = {**self._stage_seconds, "other": other}
        parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages.items())
        self._line(f"ready    {in_all:.1f} s in all: {parts}\n")
        self._line(f"URL      {url}")
        self._line(f"page     {url}/ui")
        self._line(f"model    {model_id}")
        if ready.cluster is not None:
            self._line(f"status   {baton_command('status', ready.cluster)}")
            self._line(f"stop     {baton_command('down', ready.cluster)}")
        self._line(f"\n{curl_command(url, model_id, keys=keys, ca=ca)}\n")
        self._line("The same in Python, after `pip install openai`:\n")
        self._line(python_snippet(url, model_id, keys=keys, ca=ca))


def stderr_reporter() -> StartReporter:
    """Return a reporter for commands whose standard output is read by programs."""
    return StartReporter(Console(stderr=True, highlight=False, soft_wrap=True))


def format_size(nbytes: float) -> str:
    """Return ``nbytes`` in KiB, MiB or GiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(nbytes) >= scale:
            value = nbytes / scale
            return f"{value:.1f} {unit}" if value < 100 and unit == "GiB" else f"{value:.0f} {unit}"
    return f"{nbytes / 1024:.0f} KiB"
