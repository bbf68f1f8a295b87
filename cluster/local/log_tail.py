"""Reads the ends of logs, and what is appended to them, for `baton logs` on this machine and on the
nodes of a Ray cluster."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeAlias

from cluster.local.kept_logs import MAX_BYTES, read_end, without_headers

LogFiles: TypeAlias = dict[str, Path]
LogLines: TypeAlias = dict[str, list[bytes]]


SOURCES = (
    *("prefill", "decode", "router", "autoscaler", "supervisor", "controller"),
    *("progress", "redis", "decisions"),
)
"""Words that name logs; a pid and the id of a worker do, too."""
_LEAST_ID = 6  # characters, as `baton status` shows
_ID = re.compile(r"[0-9]+|[0-9a-f]{4,32}")


def match_logs(found: LogFiles, source: str | None) -> LogFiles:
    """Return the logs of ``source``: by kind, by the pid of a process or of its engine, or by the
    beginning of a worker's id; None: all."""
    if source is None:
        return found
    chosen = {n: p for n, p in found.items() if source in n.removesuffix(".log").split("-")}
    chosen = chosen or {n: p for n, p in found.items() if n.startswith(f"{source}.")}
    if chosen or not _ID.fullmatch(source):
        return chosen
    texts = {name: read_end(path, MAX_BYTES) for name, path in found.items()}
    id_ = source.encode()
    # A worker's own log says that it is ready; logs of others may name it, too.
    own = rb"\bengine pid %s\b|: \w+ worker %s" % (id_, id_)
    for named in (own, *([rb"\b%s" % id_] if len(source) >= _LEAST_ID else [])):
        if chosen := {name: found[name] for name, text in texts.items() if re.search(named, text)}:
            break
    return chosen


def unknown_source_text(source: str | None, names: Collection[str]) -> str:
    """Say that no log has the name ``source``, and what can be typed. ``names``: of the logs."""
    near = difflib.get_close_matches(source or "", SOURCES, n=1)
    meant = f"; did you mean {near[0]}?" if near and source not in SOURCES else ""
    words = [each for each in SOURCES if any(re.match(rf"{each}\b", name) for name in names)]
    pids = sorted({pid for name in names for pid in re.findall(r"-(\d+)\.", name)})
    numbers = [f"a pid ({', '.join(pids)})"] if pids else []
    expected = ", ".join([*words, *numbers, "or the id of a worker as `baton status` shows it"])
    return f"no log has the name {source!r}{meant}; there are {expected}"


class LogTail:
    """The logs that ``find`` returns: their files may grow, and there may be more each time.

    A log that moves to another folder, as when its run ends, goes on where it was read to."""

    def __init__(self, find: Callable[[], LogFiles]) -> None:
        self._find = find
        self._read_to: dict[str, tuple[Path, int]] = {}

    @property
    def count(self) -> int:
        """Number of logs that were found so far."""
        return len(self._read_to)

    def last_lines(self, count: int) -> LogLines:
        """Return the last ``count`` lines of each log."""
        return {name: self._last_lines(name, path)[-count:] for name, path in self._find().items()}

    def new_lines(self) -> LogLines:
        """Return the whole lines that were appended since the last call, of logs with any."""
        found = {name: self._new_lines(name, path) for name, path in self._find().items()}
        return {name: lines for name, lines in found.items() if lines}

    def _last_lines(self, name: str, path: Path) -> list[bytes]:
        end = _size(path)
        self._read_to[name] = path, end
        return without_headers(read_end(path, MAX_BYTES, end))

    def _new_lines(self, name: str, path: Path) -> list[bytes]:
        before, begin = self._read_to.get(name, (path, 0))
        if (size := _size(path)) < begin:  # a file that was begun again, or the end of a kept log
            begin = 0 if path == before else size
        text = _read_at(path, begin)
        if len(text) < MAX_BYTES or b"\n" in text:  # otherwise a part of a very long line
            text = text[: text.rfind(b"\n") + 1]
        self._read_to[name] = path, begin + len(text)
        return without_headers(text)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_at(path: Path, begin: int) -> bytes:
    try:
        with path.open("rb") as stream:
            stream.seek(begin)
            return stream.read(MAX_BYTES)
    except OSError:
        return b""
