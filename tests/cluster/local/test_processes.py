import os
import signal
import subprocess
import sys

import pytest

from cluster.local.processes import ProcessId, kill_all


@pytest.fixture
def child() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_identity(child: "subprocess.Popen[bytes]") -> None:
    process = ProcessId.of(child.pid)
    assert process.alive()
    assert kill_all([process]) == []  # a zombie counts as dead
    assert not process.alive()
    child.wait()
    assert not process.signal(signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        ProcessId.of(child.pid)


def test_another_process_with_that_pid_is_left_alone(child: "subprocess.Popen[bytes]") -> None:
    recycled = ProcessId(child.pid, ProcessId.of(child.pid).created - 10)
    assert not recycled.alive()
    assert not recycled.signal(signal.SIGKILL)
    assert child.poll() is None
    child.kill()
    child.wait()


def test_of_this_process() -> None:
    assert ProcessId.of(os.getpid()).alive()
