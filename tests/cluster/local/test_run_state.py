import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.local import run_state
from cluster.local.processes import RUN_DIR_VARIABLE, ProcessId
from cluster.local.run_state import ClusterHome, RunState, private_dir
from protocol.errors import StartupError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterHome:
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "baton"))
    return ClusterHome("test")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_state_survives_and_is_private(home: ClusterHome) -> None:
    written = RunState(
        run_dir="/r", url="http://u", model_id="m", guardian=ProcessId.of(os.getpid()), ready=True
    )
    home.write(written)
    assert home.read() == written
    assert mode(home.path) == 0o700
    assert mode(home.path / "state.json") == 0o600


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"run_dir": 3}'])
def test_broken_state_is_none(home: ClusterHome, text: str) -> None:
    private_dir(home.path)
    (home.path / "state.json").write_text(text)
    assert home.read() is None


def test_lock_is_held_by_every_copy(home: ClusterHome) -> None:
    lock = home.lock()
    assert lock is not None
    assert home.lock() is None
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        pass_fds=(lock,),
    )
    os.close(lock)
    assert home.running()
    child.kill()
    child.wait()
    assert not home.running()


def test_clean_kills_what_a_run_left(home: ClusterHome) -> None:
    run_dir = run_state.new_run_dir()
    assert mode(run_dir) == 0o700
    home.write(RunState(run_dir=str(run_dir), url="", model_id=""))
    marked = os.environ | {RUN_DIR_VARIABLE: str(run_dir)}
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    by_environment = subprocess.Popen(sleep, env=marked, stdout=subprocess.PIPE)
    with (run_dir / "log").open("w") as log:
        by_file = subprocess.Popen(sleep, stderr=log, stdout=subprocess.PIPE)
    stranger = subprocess.Popen(sleep, stdout=subprocess.PIPE)
    for child in (by_environment, by_file, stranger):
        assert child.stdout is not None
        child.stdout.readline()
    try:
        assert home.clean() == 2
        assert by_environment.wait(5) == by_file.wait(5) == -9
        assert stranger.poll() is None
        assert not run_dir.exists()
        assert home.read() is None
        assert home.clean() == 0
    finally:
        stranger.kill()
        stranger.wait()


def test_only_run_folders_are_removed(tmp_path: Path) -> None:
    run_state.remove_run_dir(tmp_path)
    assert tmp_path.is_dir()


def test_long_tmp_is_not_used_for_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(long))
    run_dir = run_state.new_run_dir()
    try:
        assert len(str(run_dir)) <= 36
    finally:
        run_state.remove_run_dir(run_dir)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b", "x" * 65])
def test_cluster_names(home: ClusterHome, name: str) -> None:
    with pytest.raises(StartupError, match="cluster name"):
        ClusterHome(name)
