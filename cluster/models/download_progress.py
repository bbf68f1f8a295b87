"""Notices whether a download of a model goes on, in this process or in another one of the node."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from cluster.models import hub
from cluster.models.hub import HubRepo


class CacheWatch:
    """Notices that any process writes to a model's files in the cache, or to ``progress_file``."""

    def __init__(self, repo: HubRepo, progress_file: Path | None = None) -> None:
        self._blobs = hub.cache_folder() / repo.cache_name / "blobs"
        self._progress_file = progress_file
        self._seen = self._state()
        self._changed = time.monotonic()

    def idle_s(self) -> float:
        """Return the seconds since the last change that a call of this function has noticed."""
        state = self._state()
        if state != self._seen:
            self._seen, self._changed = state, time.monotonic()
        return time.monotonic() - self._changed

    def _state(self) -> set[tuple[str, int, int, int]]:
        files = list(self._blobs.iterdir()) if self._blobs.is_dir() else []
        if self._progress_file is not None:
            files.append(self._progress_file)
        found = set()
        for path in files:
            try:
                stat = path.stat()
            except OSError:  # a download has just ended, and its file has another name
                continue
            found.add((path.name, stat.st_size, stat.st_blocks, stat.st_mtime_ns))
        return found


class DownloadMeter:
    """Sums the counts that the progress bars of one download would show.

    A download may wait for a file that a process without Baton downloads, so that growing files
    in the cache count as progress, too. ``done`` and ``total`` are bytes of files that this
    process fetches; ``updates`` counts everything that it received."""

    def __init__(self, repo: HubRepo) -> None:
        self.done = self.total = self.updates = 0
        self._changed = time.monotonic()
        self._watch = CacheWatch(repo)
        self._lock = threading.Lock()

    def idle_s(self) -> float:
        """Return the seconds since bytes have arrived, here or from another process."""
        return min(time.monotonic() - self._changed, self._watch.idle_s())

    def _count(self, nbytes: int, total: int, *, written: bool) -> None:
        with self._lock:
            self._changed = time.monotonic()
            self.updates += 1
            if written:
                self.done += nbytes
                self.total = max(self.total, total)

    def bar(self) -> type[Any]:
        """Return a class of progress bars that show nothing and count here."""
        from tqdm import tqdm  # type: ignore[import-untyped]

        meter = self

        class Bar(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                # One bar counts bytes received, one bytes written, one files.
                self._written = str(kwargs.get("desc", "")).startswith("Reconstructing")
                kwargs.pop("name", None)
                super().__init__(*args, **{**kwargs, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                meter._count(int(n or 0), int(self.total or 0), written=self._written)
                return None

        return Bar
