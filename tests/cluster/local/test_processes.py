import os
import signal
import subprocess
import sys

import pytest

from cluster.local.processes import ProcessId, kill_all


@pytest.fixture
def child() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_process_id_is_not_alive_after_the_end(child: "subprocess.Popen[bytes]") -> None:
    process = ProcessId.of(child.pid)
    assert process.alive()
    assert kill_all([process]) == []  # a zombie counts as dead
    assert not process.alive()
    child.wait()
    assert not process.signal(signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        ProcessId.of(child.pid)


def test_another_process_with_the_same_pid_gets_no_signal(child: "subprocess.Popen[bytes]") -> None:
    recycled = ProcessId(child.pid, ProcessId.of(child.pid).created - 10)
    assert not recycled.alive()
    assert not recycled.signal(signal.SIGKILL)
    assert child.poll() is None
    child.kill()
    child.wait()


def test_process_id_of_this_process_is_alive() -> None:
    assert ProcessId.of(os.getpid()).alive()
