"""Progress of a start, from the supervisor to whoever shows it: one JSON object per line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec


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
