"""A disk that takes nothing more: `baton up` says which file, and leaves nothing running."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.config import assemble
from cluster.config.schema import Config
from cluster.launch import up as starting
from cluster.launch.supervisor import Supervisor
from cluster.local.disk_errors import disk_error_text
from cluster.local.start_report import StageFailed, StageNote, StartEventWriter, read_new_events
from cluster.settings.launch_settings import LaunchSettings


class FullDisk:
    """Refuses to create files and folders whose name begins with ``prefix``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prefix: str, number: int) -> None:
        def refuse(path: Any) -> None:
            name = os.fspath(path) if not isinstance(path, int) else ""
            if Path(os.fsdecode(name)).name.startswith(prefix):
                raise OSError(number, os.strerror(number), str(path))

        for module, function in ((os, "open"), (os, "mkdir"), (io, "open")):
            monkeypatch.setattr(module, function, self._wrap(getattr(module, function), refuse))

    @staticmethod
    def _wrap(real: Any, refuse: Any) -> Any:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            refuse(path)
            return real(path, *args, **options)

        return call


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all files of the cluster are, the run folder included."""
    runs = tmp_path / "runs"
    runs.mkdir()
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("cluster.local.run_state.tempfile.gettempdir", lambda: str(runs))
    monkeypatch.setattr("cluster.local.run_state._LONGEST_RUN_DIR", 1000)
    return tmp_path


def launch_settings() -> LaunchSettings:
    launch = assemble.launch_settings(Config.model_validate({"cluster": "full"}))
    return replace(launch, model_id="m", port=1)


def no_start(*_args: object, **_options: object) -> NoReturn:
    raise AssertionError("a process was started")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize(
    "name", ["full", "lock", "events.jsonl", "baton-", ".state.json", ".launch.json", "baton.log"]
)
def test_refused_file_is_named_and_nothing_stays(
    folder: Path, name: str, number: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    wanted = launch_settings()
    monkeypatch.setattr(starting, "_check_start", lambda *_, **__: wanted)
    monkeypatch.setattr("cluster.local.ports.hold_port", lambda *_: [])
    monkeypatch.setattr(subprocess, "Popen", no_start)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        FullDisk(patch, name, number)
        status = starting.up(wanted, None, lambda _: True, detach=False, port_moves=True)
    assert status == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "failed: " in said and f"/{name}" in said and os.strerror(number) in said
    assert "set BATON_HOME and TMPDIR" in said
    assert not list((folder / "runs").iterdir())
    assert not (folder / "home" / "full" / "state.json").exists()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


@pytest.fixture
def _signals() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize(("events", "status"), [("events", 1), ("/dev/full", os.EX_IOERR)])
def test_supervisor_reports_a_full_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, events: str, status: int
) -> None:
    """Where the report itself does not fit, the exit status tells it."""
    monkeypatch.setattr("cluster.local.die_with_parent.die_with_parent", lambda *_: None)
    path = folder / events
    launch = replace(launch_settings(), run_dir=str(folder / "runs"), events_path=str(path))
    supervisor = Supervisor(launch)

    def full() -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x/redis.log")

    monkeypatch.setattr(supervisor, "_start", full)
    assert supervisor.run() == status
    if status == 1:
        with path.open("rb") as stream:
            [event] = read_new_events(stream)
        assert isinstance(event, StageFailed) and "/x/redis.log cannot be written" in event.reason


def test_line_that_was_cut_does_not_take_the_next_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "events", os.write
    write = StartEventWriter(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:9]))
        with pytest.raises(OSError, match="No space left"):
            write(StageNote("cut"))
    write(StageNote("whole"))
    with path.open("rb") as stream:
        assert list(read_new_events(stream)) == [StageNote("whole")]


def test_every_command_reports_a_full_disk_as_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        FullDisk(patch, "ca", errno.ENOSPC)
        result = CliRunner().invoke(app, ["certs", "init", str(tmp_path / "ca")])
    assert result.exit_code == 1 and "No space left on device" in result.output
    assert "Traceback" not in result.output


def test_errors_that_are_not_of_a_disk_are_not_explained() -> None:
    assert disk_error_text(OSError(errno.ECONNREFUSED, "refused")) is None
    text = disk_error_text(OSError(errno.ENOSPC, "full"), Path("/run"))
    assert text is not None and text.startswith("/run cannot be written: No space left on device")
