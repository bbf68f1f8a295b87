"""What a running cluster leaves on disk for `baton down` and the next `baton up`.

$BATON_HOME/<cluster>/ (default ~/.baton/<cluster>/), mode 0700
    lock          held by guardian and supervisor as long as they live: the truth about running
    state.json    who they are, and where it serves
    events.jsonl  progress, written by the supervisor and shown by `baton up`
    baton.log     what the supervisor printed
/tmp/baton-XXXXXXXX/, mode 0700: sockets and logs of one run; short, because of Unix sockets
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

import msgspec

from cluster.local import processes
from cluster.local.processes import ProcessId
from protocol.errors import StartupError

RUN_PREFIX = "baton-"
_LONGEST_RUN_DIR = 36  # Ray appends up to 70 bytes to it for its sockets
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of state.json. The pids are None until the supervisor has started."""

    run_dir: str
    url: str
    model_id: str
    guardian: ProcessId | None = None
    supervisor: ProcessId | None = None
    ready: bool = False
    ray_address: str | None = None


def private_dir(path: Path) -> Path:
    """``path`` as a folder of ours that only we can enter."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise StartupError(f"{path} belongs to another user: set BATON_HOME to a folder of yours")
    path.chmod(0o700)
    return path


def new_run_dir() -> Path:
    """A new private folder with a path short enough for the sockets of Redis and Ray."""
    base = Path(tempfile.gettempdir()).resolve()
    if len(os.fsencode(base)) + len(RUN_PREFIX) + 9 > _LONGEST_RUN_DIR:
        base = Path("/tmp")
    return Path(tempfile.mkdtemp(prefix=RUN_PREFIX, dir=base))


def remove_run_dir(path: Path) -> None:
    """Removes what ``new_run_dir`` made, and nothing else, whatever state.json says."""
    if path.name.startswith(RUN_PREFIX) and path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)


def home_path(cluster: str) -> Path:
    """Where ``Home`` of this name lies, whether or not it is there."""
    base = os.environ.get("BATON_HOME")
    return (Path(base) if base else Path.home() / ".baton") / cluster


class Home:
    """The state folder of one cluster."""

    def __init__(self, cluster: str) -> None:
        if not _NAME.fullmatch(cluster):
            raise StartupError(f"cluster name {cluster!r}: expected letters, digits, '.', '_', '-'")
        self.cluster = cluster
        self.path = private_dir(home_path(cluster))
        self.events = self.path / "events.jsonl"
        self.log = self.path / "baton.log"
        self._state = self.path / "state.json"

    def lock(self) -> int | None:
        """Descriptor of the lock, held until every copy of it is closed; None: another has it."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def running(self) -> bool:
        fd = self.lock()
        if fd is None:
            return True
        os.close(fd)
        return False

    def read(self) -> State | None:
        """The state, or None where there is none that can be read."""
        try:
            return msgspec.json.decode(self._state.read_bytes(), type=State)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, state: State) -> None:
        write_private(self._state, msgspec.json.encode(state))

    def clean(self) -> int:
        """Ends and removes what a run that is over left behind; returns the processes killed."""
        state = self.read()
        killed = 0
        if state is not None:
            killed = processes.sweep(Path(state.run_dir))
            remove_run_dir(Path(state.run_dir))
        self._state.unlink(missing_ok=True)
        return killed


def write_private(path: Path, data: bytes) -> None:
    """Replaces ``path`` in one step by a file that only we can read."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as f:
        f.write(data)
    temporary.replace(path)
