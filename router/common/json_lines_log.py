"""``JsonLinesLog``: a file of one JSON line for each event of a kind, as a response that ended.

    event --write--> queue (QUEUE_LINES) --thread--> FILE, FILE.1 .. FILE.5

The event loop never waits for the disk: a full queue or a full disk drops lines, which are counted.
Routers of one host may be given the same file. Each takes the first free name of FILE, FILE-2,
FILE-3, ... and holds its lock while it runs.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import queue
import threading
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path

import msgspec

from protocol.errors import StartupError

log = logging.getLogger("baton.lines")

QUEUE_LINES = 10_000
FILE_BYTES = 64 << 20
OLD_FILES = 5

_ROUTERS_MAX = 64  # on one host with one file
_CLOSE_S = 2.0


class _LineFile:
    """A file of whole lines, rotated at ``limit`` bytes. Its lock lasts until it is closed.

    ``logging``'s RotatingFileHandler does not do here: when the disk is full it keeps the rest of a
    line in its buffer, writes it later into the middle of another one, and raises at its end.
    """

    def __init__(self, path: Path, limit: int) -> None:
        """Raises BlockingIOError where another process has the file, or another OSError."""
        self._path, self._limit = path, limit
        lock = path.with_name(path.name + ".lock")
        self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file = self._open()
        except OSError:
            os.close(self._lock)
            raise

    def write(self, line: bytes) -> None:
        """Raises OSError for a line that was not written."""
        size = os.fstat(self._file).st_size
        if size and size + len(line) > self._limit:
            self._rotate()
            size = 0
        written = 0
        try:
            written = os.write(self._file, line)
        finally:
            if written < len(line):  # the disk became full within the line
                os.ftruncate(self._file, size)
        if written < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        os.close(self._file)
        os.close(self._lock)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self._path, flags, 0o600)

    def _rotate(self) -> None:
        name = self._path.name
        old = [self._path.with_name(f"{name}.{number}") for number in range(1, OLD_FILES + 1)]
        if self._path.exists():  # else it was moved before, and no new one could be opened
            for newer, older in reversed(list(pairwise([self._path, *old]))):
                with suppress(FileNotFoundError):
                    newer.replace(older)
        file = self._open()
        os.close(self._file)
        self._file = file


class JsonLinesLog:
    """A log of one router: created -> start -> write for each event -> close.

    ``key``: the key of the configuration that names the file, such as ``router.usage_log``. Raises
    StartupError for a file that cannot be opened.
    """

    def __init__(self, path: str, key: str, file_bytes: int = FILE_BYTES) -> None:
        self.dropped = 0  # lines
        self._what = key.rpartition(".")[2].replace("_", " ")
        self._file = _open_first_free(Path(path).expanduser(), key, file_bytes)
        self._lines: queue.Queue[msgspec.Struct | None] = queue.Queue(QUEUE_LINES)
        self._thread = threading.Thread(target=self._write_lines, name=self._what, daemon=True)
        self._fails = False  # the last line was dropped, and that was logged

    def start(self) -> None:
        self._thread.start()

    def write(self, line: msgspec.Struct) -> None:
        """Write a line soon, or drop it where too many wait."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._drop("lines were written faster than the disk accepts them")

    def close(self) -> None:
        """Write what waits, for ``_CLOSE_S`` at most."""
        while True:
            try:
                self._lines.put_nowait(None)
                break
            except queue.Full:  # of a disk that hangs
                with suppress(queue.Empty):
                    self._lines.get_nowait()
                    self.dropped += 1
        if self._thread.ident is None:
            self._file.close()
        else:
            self._thread.join(_CLOSE_S)

    def _write_lines(self) -> None:
        with closing(self._file):
            self._write_until_closed()

    def _write_until_closed(self) -> None:
        encoder = msgspec.json.Encoder()
        while (line := self._lines.get()) is not None:
            try:
                self._file.write(encoder.encode(line) + b"\n")
            except OSError as error:
                self._drop(error.strerror or "it cannot be written")
            else:
                if self._fails:
                    log.warning(
                        "the %s is written again; %d lines are lost", self._what, self.dropped
                    )
                self._fails = False

    def _drop(self, reason: str) -> None:
        self.dropped += 1
        if not self._fails:
            self._fails = True
            log.error("lines of the %s are dropped: %s", self._what, reason)


def _open_first_free(path: Path, key: str, limit: int) -> _LineFile:
    for number in range(1, _ROUTERS_MAX + 1):
        name = path.name if number == 1 else f"{path.stem}-{number}{path.suffix}"
        try:
            return _LineFile(path.with_name(name), limit)
        except BlockingIOError:
            continue
        except OSError as error:
            raise StartupError(f"{key}: cannot write {path}: {error.strerror}") from None
    raise StartupError(f"{key}: {_ROUTERS_MAX} routers write to {path} already")
