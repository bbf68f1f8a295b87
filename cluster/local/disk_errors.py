"""Turns errors of a disk into a StartupError that says which path it was and what to do.

Everything that `baton up` writes is small, so that an error means a disk that is full, read-only or
not this user's. Used where files of a cluster are created: by ``run_state``, ``up``, the supervisor
and, for every command, by ``cluster.cli.main``.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from protocol.errors import StartupError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
FULL_DISK = (*_NO_ROOM, errno.EROFS)
_OTHER = (
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ESTALE,
)


def disk_error_text(error: OSError, place: str | os.PathLike[str] = "") -> str | None:
    """Return what a user reads about an error of a disk; None for errors of other kinds.

    ``place`` is named where the error itself names no file, as that of a failed write does not.
    """
    if error.errno not in (*FULL_DISK, *_OTHER):
        return None
    name = os.fspath(place)
    if isinstance(error.filename, str | bytes):
        name = os.fsdecode(error.filename)
    what = f"{name} cannot be written" if name else "a file cannot be written"
    remedy = "set BATON_HOME and TMPDIR to folders of yours that can be written"
    if error.errno in _NO_ROOM:
        remedy = (
            "free some space (or inodes, or quota), or set BATON_HOME and TMPDIR to another disk"
        )
    return f"{what}: {os.strerror(error.errno)}; {remedy}"


@contextlib.contextmanager
def disk_errors_as_startup_errors(place: str | os.PathLike[str] = "") -> Iterator[None]:
    """Raise StartupError in the block's place for an error of a disk."""
    try:
        yield
    except OSError as error:
        text = disk_error_text(error, place)
        if text is None:
            raise
        raise StartupError(text) from error
