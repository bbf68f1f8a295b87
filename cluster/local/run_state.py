"""Owns what a running cluster keeps on disk for `baton down` and the next `baton up`.

$BATON_HOME/<cluster>/ (default ~/.baton/<cluster>/), mode 0700
    lock          held by guardian and supervisor while they live; decides whether the cluster runs
    state.json    their process ids, and the URL of the cluster
    events.jsonl  progress, written by the supervisor and shown by `baton up`
    baton.log     output of the supervisor
    logs/         logs of the last run that has ended (``kept_logs``)
/tmp/baton-XXXXXXXX/, mode 0700: sockets and logs of one run; short, because of Unix sockets
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

import msgspec

from cluster.local import processes
from cluster.local.disk_errors import disk_errors_as_startup_errors
from cluster.local.kept_logs import keep_logs
from cluster.local.processes import ProcessId
from protocol.errors import StartupError

RUN_PREFIX = "baton-"
_LONGEST_RUN_DIR = 36  # Ray appends up to 70 bytes to it for its sockets
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of state.json. The process ids are None until the supervisor has started."""

    run_dir: str
    url: str
    model_id: str
    guardian: ProcessId | None = None
    supervisor: ProcessId | None = None
    ready: bool = False
    ray_address: str | None = None
    ca: str | None = None  # file of the CA that clients of ``url`` must trust
    program: str = ""  # fingerprint of the program that deployed the replicas


def private_dir(path: Path) -> Path:
    """Create ``path`` as a folder of this user with mode 0700, and return it.

    Raises StartupError, as all functions here that write, where the disk does not take it."""
    with disk_errors_as_startup_errors(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid != os.getuid():
            text = f"{path} belongs to another user: set BATON_HOME to a folder of yours"
            raise StartupError(text)
        if path.stat().st_mode & 0o777 != 0o700:
            path.chmod(0o700)
    return path


def new_run_dir() -> Path:
    """Create a private folder with a path short enough for the sockets of Redis and Ray."""
    try:
        base = Path(tempfile.gettempdir()).resolve()
    except FileNotFoundError as error:  # Python has tried to write to each of its candidates
        text = "no folder for temporary files can be written (TMPDIR, /tmp): make room in one"
        raise StartupError(text) from error
    if len(os.fsencode(base)) + len(RUN_PREFIX) + 9 > _LONGEST_RUN_DIR:
        base = Path("/tmp")
    with disk_errors_as_startup_errors(base):
        return Path(tempfile.mkdtemp(prefix=RUN_PREFIX, dir=base))


def remove_run_dir(path: Path) -> None:
    """Remove a folder made by ``new_run_dir``, and never another one that state.json may name."""
    if path.name.startswith(RUN_PREFIX) and path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)


def cluster_home_path(cluster: str) -> Path:
    """Return the path of the state folder of ``cluster``, which may not exist."""
    base = os.environ.get("BATON_HOME")
    return (Path(base) if base else Path.home() / ".baton") / cluster


def running_clusters() -> list[tuple[str, RunState]]:
    """Return name and state of each cluster of this user that runs on this machine, by name."""
    try:
        names = sorted(each.name for each in cluster_home_path("x").parent.iterdir())
    except OSError:
        return []
    found = []
    for name in names:
        if _NAME.fullmatch(name) and (cluster_home_path(name) / "lock").is_file():
            home = ClusterHome(name)
            state = home.read()
            if state is not None and home.running():
                found.append((name, state))
    return found


def others_text(cluster: str) -> str:
    """Return a clause with the running clusters, for an error about ``cluster``, which does not
    run; empty if none does."""
    names = [name for name, _ in running_clusters() if name != cluster]
    return f" (running: {', '.join(names)}; --cluster names one)" if names else ""


class ClusterHome:
    """The state folder of one cluster; created when a run takes its lock or writes its state."""

    def __init__(self, cluster: str) -> None:
        if not _NAME.fullmatch(cluster):
            raise StartupError(f"cluster name {cluster!r}: expected letters, digits, '.', '_', '-'")
        self.cluster = cluster
        self.path = cluster_home_path(cluster)
        if self.path.exists():
            private_dir(self.path)  # one of another user is refused
        self.events = self.path / "events.jsonl"
        self.log = self.path / "baton.log"
        self.kept_logs = self.path / "logs"
        self._state = self.path / "state.json"

    def lock(self) -> int | None:
        """Return a descriptor of the lock, which is held until every copy of it is closed.

        None when another process holds the lock."""
        path = private_dir(self.path) / "lock"
        with disk_errors_as_startup_errors(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def running(self) -> bool:
        if not (self.path / "lock").exists():
            return False
        fd = self.lock()
        if fd is None:
            return True
        os.close(fd)
        return False

    def read(self) -> RunState | None:
        """Return the state, or None when there is no readable one."""
        try:
            return msgspec.json.decode(self._state.read_bytes(), type=RunState)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, state: RunState) -> None:
        private_dir(self.path)
        write_private(self._state, msgspec.json.encode(state))

    def clean(self) -> int:
        """Remove what a finished run left behind; return the number of processes killed."""
        state = self.read()
        killed = 0
        if state is not None:
            killed = processes.kill_run_processes(Path(state.run_dir))
            keep_logs(Path(state.run_dir), self.kept_logs)
            remove_run_dir(Path(state.run_dir))
        self._state.unlink(missing_ok=True)
        return killed


def write_private(path: Path, data: bytes) -> None:
    """Replace ``path`` atomically by a file with mode 0600. Raises StartupError for the disk's
    errors, and leaves the old file then."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with disk_errors_as_startup_errors(path):
            temporary.unlink(missing_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "wb") as f:
                f.write(data)
            temporary.replace(path)
    except StartupError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
