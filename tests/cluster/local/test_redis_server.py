import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from cluster.local import run_state
from cluster.local.processes import ProcessId
from cluster.local.redis_server import EmbeddedRedis
from protocol.errors import StartupError


@pytest.fixture
def folder() -> Iterator[Path]:
    path = run_state.new_run_dir()
    yield path
    run_state.remove_run_dir(path)


def test_serves_on_a_private_socket_only(folder: Path) -> None:
    server = EmbeddedRedis(folder)
    server.start()
    try:
        assert server.pid is not None
        with redis.Redis.from_url(server.url) as client:
            assert client.set("k", "v")
        assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
        assert psutil.Process(server.pid).net_connections("inet") == []
    finally:
        server.stop()
    assert not server.socket.exists()
    assert list(folder.glob("*.rdb")) == []
    server.stop()


def test_dies_with_its_parent(folder: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from cluster.local.redis_server import *\n"
        "r = EmbeddedRedis(Path(sys.argv[1])); r.start(); print(r.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(folder)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    server = ProcessId.of(int(parent.stdout.readline()))
    assert server.alive()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 5
    while server.alive() and time.monotonic() < end:
        time.sleep(0.02)
    assert not server.alive()


def test_failed_start_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cluster.local.redis_server.redis_server_binary", lambda: Path("/bin/false")
    )
    with pytest.raises(StartupError, match="did not start"):
        EmbeddedRedis(folder).start(deadline_s=2.0)


def test_too_long_socket_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="107 bytes"):
        EmbeddedRedis(tmp_path / ("x" * 100))
