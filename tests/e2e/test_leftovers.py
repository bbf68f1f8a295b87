"""Nothing is left behind, however the launcher goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.lib.local_cluster import baton

pytestmark = [pytest.mark.e2e, pytest.mark.system, pytest.mark.timeout(180)]


def ours(home: Path) -> list[psutil.Process]:
    """Every process that was started under this home."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("BATON_HOME") == str(home):
                found.append(process)
        except psutil.Error:
            continue
    return found


def launch(home: Path) -> subprocess.Popen[str]:
    """`baton up` in the foreground, returned when it serves."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli.main", "up", "--threads", "1"],
        env={**os.environ, "BATON_HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if line.startswith("ready"):
            return launcher
    raise AssertionError("baton up did not become ready")


def wait_until_gone(home: Path, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while left := ours(home):
        assert time.monotonic() < deadline, [p.cmdline() for p in left]
        time.sleep(0.2)


def test_kill_9_of_the_launcher_leaves_nothing(tmp_path: Path) -> None:
    launcher = launch(tmp_path)
    assert len(ours(tmp_path)) > 5
    launcher.kill()
    launcher.wait()
    wait_until_gone(tmp_path, 15.0)


def test_ctrl_c_drains_and_leaves_nothing(tmp_path: Path) -> None:
    launcher = launch(tmp_path)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=30) in (0, 130)
    wait_until_gone(tmp_path, 2.0)


def test_down_ends_up_in_the_other_terminal(tmp_path: Path) -> None:
    launcher = launch(tmp_path)
    assert "is down" in baton(tmp_path, "down")
    said, _ = launcher.communicate(timeout=10)
    assert launcher.returncode == 0
    assert said.rstrip().endswith("the cluster was stopped by another process; no process is left")
    wait_until_gone(tmp_path, 2.0)
