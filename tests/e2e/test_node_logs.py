"""`baton logs --address` on a real Ray cluster, which has no dashboard."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.local import run_state
from cluster.local.processes import RUN_DIR_VARIABLE, kill_run_processes
from cluster.serve import ray_runtime
from tests.system import HEED_INTERRUPTS

pytestmark = [pytest.mark.e2e, pytest.mark.system, pytest.mark.timeout(120)]

SCRIPT = """
import os, sys
from pathlib import Path
from cluster.serve import ray_runtime
ray_runtime.prepare_environment(Path(sys.argv[1]))
address = ray_runtime.start_ray(Path(sys.argv[1]), gpus=0)
import ray

def replica(kind):
    class Replica:
        def write(self, line):
            print(line, file=sys.stderr, flush=True)
    Replica.__name__ = f"ServeReplica:baton-{kind}:Worker"  # as Ray Serve names its actors
    return ray.remote(num_cpus=0)(Replica).remote()

decode, router = replica("decode"), replica("router")
ray.get([decode.write.remote("engine of decode worker 1a2b3c4d: killed by signal 9")])
ray.get([router.write.remote("a line of the router")])
print(address, os.environ["RAY_AUTH_TOKEN"], flush=True)
for line in sys.stdin:
    ray.get(decode.write.remote(line.strip()))
os._exit(0)
"""


@pytest.fixture(scope="module")
def run_dir() -> Iterator[Path]:
    folder = run_state.new_run_dir()
    yield folder
    kill_run_processes(folder)
    run_state.remove_run_dir(folder)


def test_logs_of_all_nodes_are_printed_and_followed(run_dir: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment = clean | {RUN_DIR_VARIABLE: str(run_dir)}
    ray = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(run_dir)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert ray.stdin is not None and ray.stdout is not None
    address, token = ray.stdout.readline().split()
    environment |= ray_runtime.ray_environment(token)
    logs = [sys.executable, "-m", "cluster.cli.main", "logs", "--address", address]

    refused = subprocess.run(
        [*logs, "nothing"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 2
    expected = r"no log has the name 'nothing'; there are decode, router, a pid \(\d+, \d+\), or"
    assert re.search(expected, refused.stderr)

    following = subprocess.Popen(
        [*HEED_INTERRUPTS, *logs, "1a2b3c4d", "--follow"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert following.stdout is not None
    assert following.stdout.readline().endswith("1a2b3c4d: killed by signal 9\n")
    ray.stdin.write("a new line\n")
    ray.stdin.flush()
    assert following.stdout.readline().endswith(": a new line\n")
    following.send_signal(signal.SIGINT)
    assert following.wait(20) == 0
    ray.stdin.close()
    assert ray.wait(10) == 0
