"""The machines of the three-host test are as apart as real ones, and go with whoever made them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.hosts import Network
from tests.e2e.hosts.files import KEY
from tests.system import needs

pytestmark = [pytest.mark.e2e, pytest.mark.system]

_SSH = f"ssh -o StrictHostKeyChecking=no -o ConnectTimeout=1 -i ~/{KEY}"
_KILLED = """
import os, signal
from tests.e2e.hosts import Network
with Network() as net:
    net.add("a").run("setsid sleep 1000 > /dev/null 2>&1 &")
    print(*net.hosts[0].processes(), net.hosts[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    needs("sshd", "ssh", "ip", "tc", "unshare", "nsenter", root=True)
    with Network() as net:
        for name in ("a", "b"):
            net.add(name)
        yield net


def test_each_has_its_own(net: Network) -> None:
    a, b = net.hosts
    for host in (a, b):
        host.run(f"echo {host.name} | tee ~/file /tmp/file /dev/shm/file")
    show = "hostname; hostname -I; cat ~/file /tmp/file /dev/shm/file"
    said = a.run(f"{_SSH} root@{b.address} '{show}'").split()
    assert said[-5:] == ["b", b.address, "b", "b", "b"]
    assert not b.processes()


def test_a_cut_link_is_silent_and_heals(net: Network) -> None:
    a, b = net.hosts
    net.cut(b)
    with pytest.raises(RuntimeError, match="timed out"):
        a.run(f"{_SSH} root@{b.address} true")
    net.heal(b)
    a.wait_for(f"{_SSH} root@{b.address} true")


def test_a_shaped_link_is_slow(net: Network) -> None:
    a, b = net.hosts
    before, began = net.received(b), time.monotonic()
    net.shape(b, "40mbit")
    a.run(f"head -c 2500000 /dev/zero | {_SSH} root@{b.address} 'cat > /dev/null'")
    took_s = time.monotonic() - began
    net.shape(b, None)
    assert net.received(b) - before > 2_500_000
    assert took_s > 0.4  # 20 Mbit


def test_one_without_power_forgets_what_was_not_on_its_disk(net: Network) -> None:
    _, b = net.hosts
    b.run("setsid sleep 1000 > /dev/null 2>&1 & echo kept > ~/kept; echo lost > /tmp/lost")
    b.wait_for("pgrep sleep")
    before = list(b.processes())
    net.kill(b)
    assert before and not any(map(psutil.pid_exists, before))
    net.restart(b)
    assert not b.processes()
    assert b.run("cat ~/kept; ! ls /tmp/lost 2> /dev/null") == "kept\n"


def test_nothing_outlives_a_test_that_is_killed(net: Network) -> None:
    repository = Path(__file__).parents[3]
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED], cwd=repository, capture_output=True, text=True, timeout=30
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    pids = [int(pid) for pid in killed.stdout.split()]
    assert len(pids) >= 2
    end = time.monotonic() + 5
    while any(map(_runs, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    """A zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
