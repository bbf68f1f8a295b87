"""Starts a cluster, watches over it, and drains it: the process that drives Ray.

starting ──stages──> serving ──SIGTERM──> draining ──> exit 0
    └── a stage fails: Failed, exit 1. Whatever is left is killed by the guardian, our parent;
        if that was killed itself, the kernel sends SIGTERM and we sweep (``_orphaned``).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from cluster.launch import guardian
from cluster.local import die_with_parent, ports, processes
from cluster.local.processes import ProcessId
from cluster.local.redis_server import EmbeddedRedis
from cluster.local.run_state import Home, State, remove_run_dir
from cluster.local.start_report import Began, Done, Event, Failed, Ready, Writer
from cluster.serve import node, ray_runtime
from cluster.serve.node import Place, fingerprint
from cluster.settings.launch_settings import Launch, read_launch
from protocol.errors import StartupError

# MERGED cluster.deadline
# A deadline for calls that know none.


@contextlib.contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Raises StartupError within the block once ``seconds`` are over. In the main thread only, and
    as soon as it is back in Python."""

    def on_alarm(_number: int, _frame: FrameType | None) -> None:
        raise StartupError(f"{what} within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class Stopped(Exception):
    """SIGTERM came before it was ready."""


class Supervisor:
    """One run of one cluster. ``run`` reads straight down."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._home = Home(launch.cluster)
        self._run_dir = Path(launch.run_dir)
        self._write = Writer(Path(launch.events_path))
        self._parent = os.getppid()
        self._stop = threading.Event()
        self._starting = True
        self._stage = "start"
        self._ray_address: str | None = None
        self._held: list[socket.socket] = []
        self._redis: EmbeddedRedis | None = None

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the guardian passes SIGTERM
        die_with_parent.die_with_parent(self._parent, signal.SIGTERM)
        self._save(ready=False)
        try:
            self._start()
            self._starting, self._stage = False, "serve"
            self._wait()
            self._drain()
        except Stopped:
            pass
        except StartupError as e:
            print(ray_runtime.replica_errors(self._run_dir), flush=True)
            self._write(Failed(self._stage, str(e)))
            return 1
        finally:
            if self._orphaned():
                self._sweep()
        return 0

    def _start(self) -> None:
        redis_url = self._stage_redis()
        self._begin("ray", self._launch.start_deadline_s)
        launch = self._launch
        gpus = 0 if launch.workers["decode"].device == "cpu" else ray_runtime.gpu_count()
        self._held = ports.hold(launch.host, launch.port)  # routers share it, as this user
        self._adopt(redis_url)
        with deadline(launch.start_deadline_s, "Ray did not start"):
            self._ray_address = ray_runtime.start(self._run_dir, gpus=gpus)
            signal.signal(signal.SIGTERM, self._on_signal)  # Ray has put its own in place
            ray_runtime.start_serve()
        self._end("Ray and Serve, " + (f"{gpus} GPU(s)" if gpus else "no GPU"))
        self._begin("deploy")
        from cluster.serve import (  # they import Serve, which must see the environment
            applications,
            deploy,
        )
        from cluster.serve.router_probe import Probe

        share = applications.gpu_share(gpus, launch.most_workers(gpus))
        place = Place(launch.events_path, launch.drain_s, fingerprint())
        deploy.run(launch, applications.Layout(place, share), self._write)
        self._end(launch.counts)
        self._begin("test")
        keys = launch.router.api_keys is not None
        probe = Probe(launch.url, launch.router.http_tls)
        tokens = probe.answers(launch.model_id, launch.start_deadline_s, self._write, keys=keys)
        self._end(f"a completion streamed in {tokens} parts" if tokens else "the router is ready")
        self._save(ready=True)
        self._write(Ready(launch.url, launch.model_id, keys))

    def _adopt(self, redis_url: str) -> None:
        """The environment that Ray's processes, and so the replicas, inherit."""
        token = self._launch.token or secrets.token_hex(32)
        secret = self._launch.secret or secrets.token_hex(32)
        os.environ.update(node.environment(self._launch, redis_url, token, secret))
        ray_runtime.prepare(self._run_dir)

    def _stage_redis(self) -> str:
        self._begin("redis")
        if self._launch.redis_url is not None:
            _check_redis(self._launch.redis_url)
            self._end("the one given")
            return self._launch.redis_url
        self._redis = EmbeddedRedis(self._run_dir)
        self._redis.start()
        self._end("embedded, on a private socket")
        return self._redis.url

    def _wait(self) -> None:
        while not self._stop.wait(1.0):
            dead = ray_runtime.dead_process()
            if dead is not None:
                raise StartupError(f"{dead} died")

    def _drain(self) -> None:
        from cluster.serve import deploy

        began = time.monotonic()
        deploy.drain()
        print(f"drained in {time.monotonic() - began:.1f} s", flush=True)
        if self._redis is not None:
            self._redis.stop()

    def _begin(self, stage: str, within_s: float | None = None) -> None:
        self._stage = stage
        self._write(Began(stage, within_s))

    def _end(self, text: str) -> None:
        self._write(Done(self._stage, text))

    def _save(self, *, ready: bool) -> None:
        self._home.write(
            State(
                run_dir=self._launch.run_dir,
                url=self._launch.url,
                model_id=self._launch.model_id,
                guardian=ProcessId.of(self._parent),
                supervisor=ProcessId.of(os.getpid()),
                ready=ready,
                ray_address=self._ray_address,
            )
        )

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stop.set()
        if self._starting:
            self._starting = False  # a second signal must not interrupt the tearing down
            raise Stopped

    def _orphaned(self) -> bool:
        return os.getppid() != self._parent

    def _sweep(self) -> None:
        """The guardian's work, in its place."""
        guardian.become_subreaper()
        guardian.kill_descendants()
        processes.sweep(self._run_dir)
        remove_run_dir(self._run_dir)


def _check_redis(url: str) -> None:
    """Raises StartupError unless a Redis answers at ``url``."""
    import redis

    from cluster.settings.worker_settings import without_password

    try:
        with redis.Redis.from_url(url, socket_timeout=3.0, socket_connect_timeout=3.0) as client:
            client.ping()
    except (redis.RedisError, ValueError, OSError) as e:
        raise StartupError(f"no Redis answers at {without_password(url)}: {e}") from e


def main() -> int:
    """Run as: python -m cluster.launch.supervisor LAUNCH_FILE."""
    lock = os.environ.pop("BATON_LOCK_FD", None)
    if lock is not None:
        os.set_inheritable(int(lock), False)  # ours until we end; not for Ray's processes
    launch = read_launch(Path(sys.argv[1]))
    try:
        return Supervisor(launch).run()
    except Exception as e:
        Writer(Path(launch.events_path))(_unexpected(e))
        raise


def _unexpected(error: Exception) -> Event:
    first = str(error).strip().partition("\n")[0]
    return Failed("start", f"{type(error).__name__}: {first}")


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Ray's exit handlers take seconds; what they would stop, the guardian kills at once.
    os._exit(status)
