"""Shows the stages of a start: a line each with its time, and at the end what to paste."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Self, TypeAlias, assert_never

import msgspec
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.status import Status

# MERGED cluster.events
# Progress of a start, from the supervisor to whoever shows it: one JSON object per line.


class Began(msgspec.Struct, frozen=True, tag="began"):
    """A stage has started, and has so many seconds where there is a deadline of its own."""

    stage: str
    within_s: float | None = None


class Note(msgspec.Struct, frozen=True, tag="note"):
    """Something worth a line within the current stage."""

    text: str


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """What the current stage waits for, and the seconds that are left for it."""

    names: tuple[str, ...]
    left_s: float


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The stage has ended well."""

    stage: str
    text: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """It serves. ``keys``: to those who have an API key."""

    url: str
    model_id: str
    keys: bool = False


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It does not start; everything is being torn down."""

    stage: str
    reason: str


Event: TypeAlias = Began | Note | Waiting | Done | Ready | Failed

_decoder = msgspec.json.Decoder(Event)


class Writer:
    """Appends events. One write each, so that lines of several processes do not mix."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, event: Event) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, msgspec.json.encode(event) + b"\n")
        finally:
            os.close(fd)


def new_events(stream: BinaryIO) -> Iterator[Event]:
    """Whole lines that have been appended since the last call; what cannot be read is skipped."""
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


SPARSE_S = 5.0
"""Least time between two lines of progress where there is no terminal."""
_EXAMPLE_PROMPT = "def fibonacci(n):"


class Reporter:
    """Prints events. On a terminal the running stage has a spinner; elsewhere lines are plain."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._clock = clock
        self._began = clock()
        self._stage_began = self._began
        self._said = self._began
        self._doing: dict[str, str] = {}  # what each kind of worker said last
        self._status: Status | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case Began(stage, within_s):
                self._stage_began = self._clock()
                self._spin(stage if within_s is None else f"{stage}, at most {within_s:.0f} s")
            case Note(text):
                self._note(text)
            case Waiting(names, left_s):
                self._progress(self._waiting(names, left_s))
            case Done(stage, text):
                self._spin(None)
                elapsed = self._clock() - self._stage_began
                self._line(f"{stage:<8} {text}  ({elapsed:.1f} s)")
            case Failed(stage, reason):
                self._spin(None)
                self._line(f"{stage:<8} failed: {reason}", style="bold red")
            case Ready(url, model_id, keys):
                self._spin(None)
                self._ready(url, model_id, keys=keys)
            case _:
                assert_never(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._spin(None)
        self._line(text)

    def show(self, what: RenderableType) -> None:
        """A table, within the current stage."""
        self._console.print(Padding(what, (0, 0, 0, 9)), style="dim", soft_wrap=False)

    def download(self, done: int, total: int) -> None:
        """How far a model's download is, in bytes."""
        percent = f" {100 * done // total}%" if total else ""
        of = f" of {size(total)}" if total else ""
        self._progress(f"downloading the model: {size(done)}{of}{percent}")

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
        who, _, what = text.partition(": ")
        self._doing[who] = what
        if text.endswith("%"):
            self._progress(text)
        else:
            self._line(f"         {text}", style="dim")

    def _waiting(self, names: tuple[str, ...], left_s: float) -> str:
        """Whom it waits for, with the last that each has said."""
        said = [f"{n} ({self._doing[n]})" if self._doing.get(n) else n for n in names]
        return f"{left_s:.0f} s left for {', '.join(said)}"

    def _progress(self, text: str) -> None:
        """How far it is: on a terminal the spinner says so, elsewhere a line now and then."""
        if self._status is not None:
            self._status.update(f"{text} ...")
        elif self._console.is_terminal:
            self._spin(text)
        elif self._clock() - self._said > SPARSE_S:
            self._line(f"         {text}")

    def _line(self, text: str, style: str | None = None) -> None:
        self._said = self._clock()
        self._console.print(text, style=style, markup=False)

    def _ready(self, url: str, model_id: str, *, keys: bool) -> None:
        self._line(f"ready    {self._clock() - self._began:.1f} s in all\n")
        self._line(f"URL      {url}")
        self._line(f"model    {model_id}\n")
        self._line(curl_command(url, model_id, keys=keys) + "\n")
        self._line(python_snippet(url, model_id, keys=keys))


def on_stderr() -> Reporter:
    """For programs whose own output is read by others."""
    return Reporter(Console(stderr=True, highlight=False, soft_wrap=True))


def curl_command(url: str, model_id: str, *, keys: bool = False) -> str:
    """A command to paste that streams a completion. ``keys``: it takes one from BATON_API_KEY."""
    body = {"model": model_id, "prompt": _EXAMPLE_PROMPT, "max_tokens": 64, "stream": True}
    data = json.dumps(body).replace("'", "'\\''")
    key = '  -H "Authorization: Bearer $BATON_API_KEY" \\\n' if keys else ""
    return (
        f"curl -N {url}/v1/completions \\\n{key}"
        f"  -H 'Content-Type: application/json' \\\n  -d '{data}'"
    )


def python_snippet(url: str, model_id: str, *, keys: bool = False) -> str:
    """The same with the ``openai`` package."""
    key = 'os.environ["BATON_API_KEY"]' if keys else '"none"'
    return (
        f"{'import os' + 2 * chr(10) if keys else ''}"
        "from openai import OpenAI\n\n"
        f'client = OpenAI(base_url="{url}/v1", api_key={key})\n'
        "for part in client.completions.create(\n"
        f"    model={model_id!r}, prompt={_EXAMPLE_PROMPT!r}, max_tokens=64, stream=True\n"
        "):\n"
        '    print(part.choices[0].text, end="", flush=True)'
    )


def size(nbytes: float) -> str:
    """Bytes as people read them."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(nbytes) >= scale:
            value = nbytes / scale
            return f"{value:.1f} {unit}" if value < 100 and unit == "GiB" else f"{value:.0f} {unit}"
    return f"{nbytes / 1024:.0f} KiB"
