"""The guardian with a supervisor of a few lines: whatever ends, nothing is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from cluster.launch import guardian
from cluster.local import processes, run_state
from cluster.local.processes import RUN_DIR_VARIABLE

# Forks a child that leaves the session and loses its parent, then goes on as SCRIPT says.
SUPERVISOR = """
import os, pathlib, signal, subprocess, sys, time
run_dir = pathlib.Path(sys.argv[1])
stray = "import os, time; os.setsid(); os.fork() and os._exit(0); time.sleep(60)"
subprocess.run([sys.executable, "-c", stray])
signal.signal(signal.SIGTERM, lambda *_: (run_dir / "asked").touch() or {on_term})
(run_dir / "pid").write_text(str(os.getpid()))
{script}
"""


class Run:
    """A guardian that runs, its leash, and its run folder."""

    def __init__(self, script: str, on_term: str = "sys.exit(0)") -> None:
        self.dir = run_state.new_run_dir()
        source = SUPERVISOR.format(script=script, on_term=on_term)
        leash, self.leash = os.pipe()
        command = [sys.executable, "-I", "-S", guardian.__file__, str(leash), str(self.dir)]
        self.process = subprocess.Popen(
            [*command, sys.executable, "-c", source, str(self.dir)],
            env=os.environ | {RUN_DIR_VARIABLE: str(self.dir)},
            pass_fds=(leash,),
        )
        os.close(leash)

    def wait_for(self, name: str) -> str:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if (self.dir / name).exists() and (text := (self.dir / name).read_text() or "-"):
                return text
            time.sleep(0.02)
        raise AssertionError(f"{name} did not appear")

    def ended(self) -> int:
        """Status; asserts that nothing is left."""
        status = self.process.wait(10)
        assert processes.find_run_processes(self.dir) == []
        assert not self.dir.exists()
        return status


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        os.close(run.leash)
        run.process.kill()
        run.process.wait()
        processes.kill_run_processes(run.dir)
        run_state.remove_run_dir(run.dir)


@pytest.mark.parametrize(("script", "status"), [("sys.exit(0)", 0), ("sys.exit(3)", 3)])
def test_exit_status_is_the_supervisors(runs: list[Run], script: str, status: int) -> None:
    runs.append(Run(script))
    assert runs[0].ended() == status


def test_killed_supervisor_leaves_no_process(runs: list[Run]) -> None:
    runs.append(Run("time.sleep(60)"))
    os.kill(int(runs[0].wait_for("pid")), signal.SIGKILL)
    assert runs[0].ended() == 128 + signal.SIGKILL


def test_signal_is_forwarded_to_the_supervisor(runs: list[Run]) -> None:
    runs.append(Run("time.sleep(60)"))
    runs[0].wait_for("pid")
    runs[0].process.terminate()
    assert runs[0].ended() == 0


def test_second_signal_kills_everything(runs: list[Run]) -> None:
    runs.append(Run("while True: time.sleep(1)", on_term="None"))
    runs[0].wait_for("pid")
    runs[0].process.terminate()
    runs[0].wait_for("asked")
    runs[0].process.send_signal(signal.SIGINT)
    assert runs[0].ended() == 130


def test_broken_leash_kills_everything(runs: list[Run]) -> None:
    runs.append(Run("time.sleep(60)"))
    runs[0].wait_for("pid")
    os.close(runs[0].leash)
    runs[0].leash = os.open(os.devnull, os.O_RDONLY)
    assert runs[0].ended() == 137


def test_released_leash_keeps_the_cluster(runs: list[Run]) -> None:
    runs.append(Run("time.sleep(60)"))
    runs[0].wait_for("pid")
    os.write(runs[0].leash, b"x")
    os.close(runs[0].leash)
    runs[0].leash = os.open(os.devnull, os.O_RDONLY)
    time.sleep(0.3)
    assert runs[0].process.poll() is None
    runs[0].process.terminate()
    assert runs[0].ended() == 0
