"""`baton up`: checks the start, starts guardian and supervisor, and shows their progress.

In the foreground this process stays, forwards signals, and holds the guardian's leash: when it
dies for any reason, the cluster ends. With ``detach`` it ends once the cluster serves.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import msgspec

from cluster.doctor.subject import cluster_subject
from cluster.launch import guardian
from cluster.launch.prepare import check_and_fetch_model
from cluster.launch.update import update_cluster
from cluster.local import ports
from cluster.local.die_with_parent import die_with_parent
from cluster.local.disk_errors import disk_errors_as_startup_errors
from cluster.local.processes import RUN_DIR_VARIABLE
from cluster.local.run_state import ClusterHome, RunState, new_run_dir, remove_run_dir
from cluster.local.start_report import (
    ClusterReady,
    StageDone,
    StageFailed,
    StageStarted,
    StartEvent,
    StartReporter,
    read_new_events,
)
from cluster.local.start_snippets import baton_command
from cluster.models import drafting
from cluster.serve.scale import Confirm
from cluster.settings.connection import without_password
from cluster.settings.launch_settings import LaunchSettings
from protocol.errors import StartupError

_POLL_S = 0.05


def up(
    wanted: LaunchSettings,
    model: str | None,
    confirm: Confirm,
    *,
    detach: bool,
    port_moves: bool,
) -> int:
    """Start the cluster; return the exit status: 0 when it served, 1 when it did not start, 2 for
    a wrong option. A cluster that runs is updated.

    In the foreground this returns when the cluster was stopped. ``port_moves``: where the port is
    taken, the next free one is used. ``confirm`` asks about large jumps of an update."""
    report = StartReporter()
    if os.environ.get("BATON_DIE_WITH_PARENT") and not detach:  # `make up` sets it
        die_with_parent(os.getppid(), signal.SIGTERM)
    try:
        home = ClusterHome(wanted.cluster)
        lock = home.lock()
        if lock is None:
            state = home.read()
            if state is not None and state.ready and state.ray_address is not None:
                return update_cluster(
                    home, state, wanted, model, report, confirm, port_moves=port_moves
                )
            report.say(_already_text(home))
            return 1
        home.clean()
        launch = _check_start(wanted, model, report, port_moves=port_moves)
    except StartupError as e:
        report(StageFailed("check", str(e)))
        return e.exit_status
    finally:
        report.close()
    try:
        return _start(home, launch, report, lock, detach=detach)
    finally:
        os.close(lock)
        report.close()


def _start(
    home: ClusterHome, launch: LaunchSettings, report: StartReporter, lock: int, *, detach: bool
) -> int:
    """Start the guardian and follow the start. Where its files cannot be written, nothing stays."""
    run_dir: Path | None = None
    try:
        run_dir = new_run_dir()
        launch = msgspec.structs.replace(launch, run_dir=str(run_dir), events_path=str(home.events))
        return _StartFollower(home, launch, report, detach=detach).run(lock)
    except StartupError as e:  # the guardian does not run yet
        report(StageFailed("start", str(e)))
        home.clean()
        if run_dir is not None:
            remove_run_dir(run_dir)
        return 1


def _already_text(home: ClusterHome) -> str:
    state = home.read()
    if state is None:
        return f"cluster {home.cluster!r} is being started or stopped by another process"
    return (
        f"cluster {home.cluster!r} is starting or stopping: {state.url} ({state.model_id}); wait"
        f" until it has, or stop it with `{baton_command('down', home.cluster)}`"
    )


def _check_start(
    wanted: LaunchSettings, model: str | None, report: StartReporter, *, port_moves: bool
) -> LaunchSettings:
    """Find what would fail before anything is started; return the settings to start with."""
    report(StageStarted("check"))
    subject = cluster_subject(wanted, model, port_moves=port_moves)
    options = (wanted.check, lambda: wanted.router.check_host(wanted.host))
    found = check_and_fetch_model(subject, wanted.model_id or None, report, options)
    decode = wanted.workers["decode"]
    drafts = drafting.resolve_draft(decode.engine.speculation, model, report)
    drafting_decode = decode.with_model("", decode.model_id, speculation=drafts)
    workers = {**wanted.workers, "decode": drafting_decode}
    port = ports.first_free_port(wanted.host, wanted.port) if port_moves else wanted.port
    moved = f" ({wanted.port} is taken)" if port != wanted.port else ""
    redis = "" if wanted.redis_url is None else f", Redis {without_password(wanted.redis_url)}"
    report(StageDone("check", f"model {found.id}, port {port}{moved}{redis}"))
    return msgspec.structs.replace(
        wanted, model_path=str(found.path), model_id=found.id, port=port, workers=workers
    )


class _StartFollower:
    """Starts the guardian, and shows the events until the cluster serves, fails or ends."""

    def __init__(
        self, home: ClusterHome, launch: LaunchSettings, report: StartReporter, *, detach: bool
    ) -> None:
        self._home = home
        self._launch = launch
        self._report = report
        self._detach = detach
        self._signals = 0
        self._held: list[socket.socket] = []
        self._ready = False
        self._failed = False

    def run(self, lock: int) -> int:
        """Return the exit status. Raises StartupError where the guardian cannot be started."""
        leash_r, leash_w = os.pipe()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            # Until the supervisor holds the port.
            self._held = ports.hold_port(self._launch.host, self._launch.port)
            try:
                with disk_errors_as_startup_errors(self._home.path):
                    self._home.events.write_bytes(b"")
                    child = self._start_guardian(leash_r, lock)
            finally:
                os.close(leash_r)
            return self._follow(child, leash_w)
        finally:
            for each in self._held:
                each.close()
            os.close(leash_w)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _start_guardian(self, leash: int, lock: int) -> subprocess.Popen[bytes]:
        launch = self._launch
        self._home.write(RunState(run_dir=launch.run_dir, url=launch.url, model_id=launch.model_id))
        guard = [sys.executable, "-I", "-S", guardian.__file__, str(leash), launch.run_dir]
        supervisor = [sys.executable, "-m", "cluster.launch.supervisor", str(launch.write())]
        environment = os.environ | {
            RUN_DIR_VARIABLE: launch.run_dir,
            "BATON_LOCK_FD": str(lock),
            "BATON_KEPT_LOGS": str(self._home.kept_logs),
            "PYTHONUNBUFFERED": "1",
        }
        with self._home.log.open("wb") as log:
            return subprocess.Popen(
                [*guard, *supervisor],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(leash, lock),
                start_new_session=True,  # a Ctrl-C must reach only this process, which forwards it
            )

    def _follow(self, child: subprocess.Popen[bytes], leash: int) -> int:
        forwarded = 0
        with self._home.events.open("rb") as stream:
            while True:
                ended = child.poll() is not None
                for event in read_new_events(stream):
                    self._show(event)
                if self._ready and self._detach:
                    os.write(leash, b"x")
                    return 0
                while forwarded < self._signals and not ended:
                    forwarded += 1
                    self._report.say(_STOP_TEXTS[min(forwarded, 2)])
                    child.send_signal(signal.SIGTERM)
                if ended:
                    return self._exit_status(child.returncode)
                time.sleep(_POLL_S)

    def _show(self, event: StartEvent) -> None:
        self._report(event)
        self._ready |= isinstance(event, ClusterReady)
        self._failed |= isinstance(event, StageFailed)
        if self._ready and isinstance(event, ClusterReady) and not self._detach:
            self._report.say(
                "\nCtrl-C stops the cluster after running requests have finished; a"
                " second Ctrl-C stops it at once"
            )

    def _exit_status(self, status: int) -> int:
        """Clean up after the supervisor, and return the exit status of the command."""
        self._home.clean()
        remove_run_dir(Path(self._launch.run_dir))
        if self._signals:
            self._report.say("stopped; no process is left")
            return 0 if self._ready and self._signals == 1 else 130
        if not self._failed and status in _ENDED_ON_REQUEST:
            self._report.say("the cluster was stopped by another process; no process is left")
            return 0 if self._ready else 1
        if not self._failed and status == os.EX_IOERR:
            text = f"{self._home.path} or {self._launch.run_dir} cannot be written any more: make"
            self._report(StageFailed("start", f"{text} room, or set BATON_HOME and TMPDIR"))
        elif not self._failed:
            self._report.say(f"the supervisor ended unexpectedly (status {status})")
            self._report.say(_tail(self._home.log))
        self._report.say(f"log: {self._home.log}")
        return 1

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signals += 1


_ENDED_ON_REQUEST = (0, 130)
"""Exit statuses of a guardian that was told to stop: after the drain, and at once."""

_STOP_TEXTS = {
    1: "draining: no new requests are accepted, and running ones may finish",
    2: "stopping at once",
}


def _tail(path: Path, lines: int = 15) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
