"""Downloads models from the Hugging Face hub: once per node, with progress, retries and a deadline.

The processes of a node share a cache and take turns (``DownloadTurn``): one downloads, and the
others wait, report its progress, and find the files in the cache. A download may take any time: it
fails when no byte arrives for ``STALLED_S``. ``locate``, ``drafting`` and the planner call
``download_snapshot``.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from cluster.models import hub
from cluster.models.download_progress import CacheWatch, DownloadMeter
from cluster.models.hub import HubRepo
from protocol.errors import StartupError

STALLED_S = 60.0
"""Longest time in seconds that a download may receive nothing."""
_POLL_S = 0.2
_CHUNK_BYTES = 1 << 20  # of 10 MiB, the default, a slow link may not bring one in ``STALLED_S``
_RETRY_AFTER_S = (1.0, 2.0, 4.0, 8.0)
_LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)

DownloadProgress = Callable[[int, int], None]
"""Called with the bytes that are present and the bytes in all."""
ReportMeter = Callable[[DownloadMeter], None]


def download_snapshot(
    repo: HubRepo, patterns: list[str], progress: DownloadProgress, stalled_s: float = STALLED_S
) -> Path:
    """Fetch the missing files that match ``patterns``, and return the folder of the snapshot.

    Raises StartupError when the hub refuses, and when nothing arrives for ``stalled_s``."""
    hub.check_token()
    with DownloadTurn(repo, patterns) as turn:
        if turn.wait(progress, stalled_s):
            found = hub.cached_snapshot(repo, patterns)
            if found is not None:
                return found

        def report(meter: DownloadMeter) -> None:
            turn.publish(meter.done, meter.total, meter.updates)
            progress(meter.done, meter.total)

        return _download_with_retries(repo, patterns, report, stalled_s)


def _download_with_retries(
    repo: HubRepo, patterns: list[str], report: ReportMeter, stalled_s: float
) -> Path:
    for delay_s in (*_RETRY_AFTER_S, None):
        meter = DownloadMeter(repo)
        try:
            return _download_once(repo, patterns, meter, report, stalled_s)
        except StartupError:
            raise
        except Exception as error:
            if delay_s is None or not _may_pass(error, arrived=meter.done > 0):
                raise hub.explain_hub_error(repo, error) from error
        time.sleep(delay_s)
    raise AssertionError("the last attempt returns or raises")


def _download_once(
    repo: HubRepo, patterns: list[str], meter: DownloadMeter, report: ReportMeter, stalled_s: float
) -> Path:
    """Download in a thread, so that a silent hub can be given up. Raises its errors."""
    from huggingface_hub import constants, snapshot_download

    constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES
    ended: queue.SimpleQueue[Path | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            path = snapshot_download(
                repo.id,
                revision=repo.revision,
                allow_patterns=patterns,
                ignore_patterns=hub.NOT_NEEDED,
                tqdm_class=meter.bar(),
            )
            ended.put(Path(path))
        except Exception as error:
            ended.put(error)

    threading.Thread(target=work, daemon=True, name="download").start()
    while True:
        try:
            result = ended.get(timeout=_POLL_S)
        except queue.Empty:
            report(meter)
            if meter.idle_s() > stalled_s:
                raise StartupError(
                    f"model {str(repo)!r}: the hub has sent nothing for {stalled_s:.0f} s; files"
                    " that are complete are kept, try again"
                ) from None
            continue
        if isinstance(result, Exception):
            raise result
        return result


def _may_pass(error: Exception, *, arrived: bool) -> bool:
    """Return whether a download that failed is worth another attempt.

    ``arrived``: bytes came before the error, so that the hub can be reached in principle."""
    import httpx2
    from huggingface_hub import errors as e

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, e.HfHubHTTPError):
            return cause.response.status_code in (408, 429) or cause.response.status_code >= 500
        if isinstance(cause, httpx2.ConnectError | httpx2.ConnectTimeout | e.OfflineModeIsEnabled):
            return arrived
        if isinstance(cause, httpx2.TransportError):
            return True
        if isinstance(cause, OSError) and cause.errno in _LASTING:
            return False
        cause = cause.__cause__ or cause.__context__
    return arrived


class DownloadTurn:
    """The right to download some files of a model into this node's cache: one process has it.

    It is a lock on a file beside the locks of huggingface_hub, which the kernel releases when its
    process ends. The file has the holder's progress, for those that wait. Where the cache cannot be
    locked, every process downloads; huggingface_hub still fetches each file once."""

    def __init__(self, repo: HubRepo, patterns: list[str]) -> None:
        wanted = hashlib.sha256("\n".join([repo.revision or "", *patterns]).encode()).hexdigest()
        folder = hub.cache_folder() / ".locks" / repo.cache_name
        self._repo = repo
        self._path = folder / f"baton-{wanted[:16]}.lock"
        self._published = (-1, -1, -1)
        self._fd: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # As huggingface_hub does it: users who share a cache share its locks.
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
        except OSError:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)  # releases the lock, too
            self._fd = None

    def wait(self, progress: DownloadProgress, stalled_s: float) -> bool:
        """Wait for the turn, and return whether another process had it before.

        The holder gives up by itself after ``stalled_s`` without a byte. Raises StartupError for
        one that does not, after twice that time."""
        if self._acquire():
            return False
        watch = CacheWatch(self._repo, self._path)
        while not self._acquire():
            progress(*self._read())
            if watch.idle_s() > 2 * stalled_s:
                raise StartupError(
                    f"model {str(self._repo)!r}: another process of this node downloads it, and"
                    f" nothing has arrived for {2 * stalled_s:.0f} s; end the process that holds"
                    f" {self._path} (fuser tells which), and try again"
                )
            time.sleep(_POLL_S)
        return True

    def publish(self, done: int, total: int, updates: int) -> None:
        """Write the progress for the processes that wait, if it has changed."""
        if self._fd is None or (done, total, updates) == self._published:
            return
        self._published = (done, total, updates)
        try:
            os.pwrite(self._fd, b"%20d %20d" % (done, total), 0)
        except OSError:  # a full disk: the download reports it
            return

    def _read(self) -> tuple[int, int]:
        assert self._fd is not None
        try:
            done, total = map(int, os.pread(self._fd, 41, 0).split())
        except (OSError, ValueError):
            return 0, 0
        return done, total

    def _acquire(self) -> bool:
        if self._fd is None:
            return True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        self.publish(0, 0, 0)
        return True
