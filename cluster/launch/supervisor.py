"""The supervisor process of `baton up`: starts a cluster, watches it, and drains it.

It is the driver of Ray. ``up`` starts it as a child of the guardian.

starting ──stages──> serving ──SIGTERM──> draining ──> exit 0
    └── a stage fails: StageFailed, exit 1. The guardian, our parent, kills what is left; if the
        guardian itself was killed, the kernel sends SIGTERM, and we do its work (``_orphaned``).
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
from cluster.launch.pool_demonstration import demonstrate_pools
from cluster.launch.replica_deaths import ReplicaDeaths
from cluster.local import die_with_parent, ports, processes
from cluster.local.disk_errors import disk_error_text
from cluster.local.kept_logs import append_to_log, keep_logs
from cluster.local.processes import ProcessId
from cluster.local.redis_server import EmbeddedRedis
from cluster.local.run_state import ClusterHome, RunState, remove_run_dir
from cluster.local.start_report import (
    ClusterReady,
    StageDone,
    StageFailed,
    StageStarted,
    StartEvent,
    StartEventWriter,
)
from cluster.local.timed_log import with_time
from cluster.models.locate import demo_path
from cluster.serve import node_settings, ray_runtime
from cluster.serve.node_settings import ReplicaContext, program_fingerprint
from cluster.serve.router_probe import RouterProbe
from cluster.settings.launch_settings import LaunchSettings, read_launch, share_of_gpu
from protocol.descriptor_limit import raise_descriptor_limit
from protocol.errors import StartupError


class StoppedBeforeReady(Exception):
    """SIGTERM came while the cluster was starting."""


class Supervisor:
    """One run of one cluster; the process creates one and calls ``run``."""

    def __init__(self, launch: LaunchSettings) -> None:
        self._launch = launch
        self._home = ClusterHome(launch.cluster)
        self._run_dir = Path(launch.run_dir)
        self._write = StartEventWriter(Path(launch.events_path))
        self._parent = os.getppid()
        self._stop = threading.Event()
        self._starting = True
        self._stage = "start"
        self._ray_address: str | None = None
        self._program = program_fingerprint()
        self._held: list[socket.socket] = []
        self._redis: EmbeddedRedis | None = None

    def run(self) -> int:
        """Start, serve until SIGTERM, and drain; return the exit status."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the guardian sends SIGTERM in its place
        die_with_parent.die_with_parent(self._parent, signal.SIGTERM)
        try:
            self._save(ready=False)
            self._start()
            self._starting, self._stage = False, "serve"
            self._wait()
            self._drain()
        except StoppedBeforeReady:
            pass
        except StartupError as e:
            return self._fail(str(e))
        except OSError as e:
            text = disk_error_text(e, self._run_dir)
            if text is None:
                raise
            return self._fail(text)
        finally:
            if self._orphaned():
                self._kill_everything()
        return 0

    def _fail(self, text: str) -> int:
        """Report why the cluster stops; return the exit status, which tells `baton up` about a
        full disk where that takes no report either."""
        _log(ray_runtime.replica_errors(self._run_dir))
        try:
            self._write(StageFailed(self._stage, text))
        except OSError:
            return os.EX_IOERR
        return 1

    def _start(self) -> None:
        gpus = self._start_ray(self._start_redis())
        self._deploy(gpus)
        self._probe()
        self._save(ready=True)
        launch = self._launch
        keys = launch.router.api_keys is not None
        self._write(
            ClusterReady(launch.url, launch.model_id, keys, launch.https_ca, launch.cluster)
        )

    def _start_redis(self) -> str:
        """Start or check Redis, and return its URL."""
        self._begin("redis")
        if self._launch.redis_url is not None:
            _check_redis(self._launch.redis_url)
            self._end("the configured one")
            return self._launch.redis_url
        self._redis = EmbeddedRedis(self._run_dir)
        self._redis.start()
        self._end("embedded, on a private socket")
        return self._redis.url

    def _start_ray(self, redis_url: str) -> int:
        """Start Ray and Serve, and return the number of GPUs for the workers."""
        launch = self._launch
        self._begin("ray", launch.start_deadline_s)
        gpus = 0 if launch.workers["decode"].engine.device == "cpu" else ray_runtime.gpu_count()
        self._held = ports.hold_port(launch.host, launch.port)  # this user's routers can share it
        self._set_environment(redis_url)
        with time_limit(launch.start_deadline_s, "Ray did not start"):
            self._ray_address = ray_runtime.start_ray(
                self._run_dir, gpus=gpus, replicas=launch.replicas
            )
            signal.signal(signal.SIGTERM, self._on_signal)  # Ray has installed its own handler
            ray_runtime.start_serve()
        self._end("Ray and Serve, " + (f"{gpus} GPU(s)" if gpus else "no GPU"))
        return gpus

    def _set_environment(self, redis_url: str) -> None:
        """Set the environment that Ray's processes, and so the replicas, inherit."""
        token = self._launch.token or secrets.token_hex(32)
        secret = self._launch.secret or secrets.token_hex(32)
        os.environ.update(node_settings.node_environment(self._launch, redis_url, token, secret))
        ray_runtime.prepare_environment(self._run_dir)

    def _deploy(self, gpus: int) -> None:
        # These modules import Serve, which reads the environment when it is imported.
        from cluster.serve import applications, deploy

        self._begin("deploy")
        launch = self._launch
        share = share_of_gpu(gpus, launch.most_workers(gpus))
        context = ReplicaContext(launch.events_path, launch.drain_s, self._program)
        deploy.deploy_cluster(launch, applications.ReplicaLayout(context, share), self._write)
        self._end(launch.counts)

    def _probe(self) -> None:
        """Wait until the router answers, and stream a test completion."""
        self._begin("test")
        launch = self._launch
        keys = launch.router.api_keys is not None
        probe = RouterProbe(launch.url, launch.router.http_tls)
        parts = probe.wait_until_answering(
            launch.model_id, launch.start_deadline_s, self._write, keys=keys
        )
        self._end(f"a completion streamed in {parts} parts" if parts else "the router is ready")
        if launch.prefill and not keys and launch.model_path == str(demo_path()):
            self._begin("demo")
            self._end(demonstrate_pools(probe, launch.model_id))

    def _wait(self) -> None:
        from cluster.serve import ray_internals

        deaths = ReplicaDeaths(self._launch.cluster, ray_internals.dead_replicas)
        while not self._stop.wait(1.0):
            dead = ray_runtime.dead_process()
            if dead is not None:
                raise StartupError(f"{dead} died")
            for pid, line in deaths.new_lines().items():
                _log(line)
                if pid is not None:  # a process that SIGKILL ends writes nothing itself
                    append_to_log(self._run_dir, pid, with_time(line))

    def _drain(self) -> None:
        from cluster.serve import deploy

        began = time.monotonic()
        deploy.drain_cluster()
        _log(f"drained in {time.monotonic() - began:.1f} s")
        if self._redis is not None:
            self._redis.stop()

    def _begin(self, stage: str, within_s: float | None = None) -> None:
        self._stage = stage
        self._write(StageStarted(stage, within_s))

    def _end(self, text: str) -> None:
        self._write(StageDone(self._stage, text))

    def _save(self, *, ready: bool) -> None:
        self._home.write(
            RunState(
                run_dir=self._launch.run_dir,
                url=self._launch.url,
                model_id=self._launch.model_id,
                guardian=ProcessId.of(self._parent),
                supervisor=ProcessId.of(os.getpid()),
                ready=ready,
                ray_address=self._ray_address,
                ca=self._launch.https_ca,
                program=self._program,
            )
        )

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stop.set()
        if self._starting:
            self._starting = False  # a second signal must not interrupt the shutdown
            raise StoppedBeforeReady

    def _orphaned(self) -> bool:
        return os.getppid() != self._parent

    def _kill_everything(self) -> None:
        """Do the guardian's work when it was killed."""
        guardian.become_subreaper()
        guardian.kill_descendants()
        processes.kill_run_processes(self._run_dir)
        keep_logs(self._run_dir, self._home.kept_logs)
        remove_run_dir(self._run_dir)


def _log(text: str) -> None:
    """Print a line to the log of the supervisor, which may be on a full disk."""
    with contextlib.suppress(OSError):
        print(with_time(text), flush=True)


def _check_redis(url: str) -> None:
    """Raise StartupError unless a Redis answers at ``url``."""
    import redis

    from cluster.settings.connection import without_password

    try:
        with redis.Redis.from_url(url, socket_timeout=3.0, socket_connect_timeout=3.0) as client:
            client.ping()
    except (redis.RedisError, ValueError, OSError) as e:
        raise StartupError(f"no Redis answers at {without_password(url)}: {e}") from e


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise StartupError in the block when ``seconds`` are over.

    It works in the main thread only, and once the running call returns to Python."""

    def on_alarm(_number: int, _frame: FrameType | None) -> None:
        raise StartupError(f"{what} within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    """Run a launch file: python -m cluster.launch.supervisor LAUNCH_FILE."""
    lock = os.environ.pop("BATON_LOCK_FD", None)
    if lock is not None:
        os.set_inheritable(
            int(lock), False
        )  # held until we end; Ray's processes must not inherit it
    raise_descriptor_limit()  # Redis and Ray inherit it
    launch = read_launch(Path(sys.argv[1]))
    try:
        return Supervisor(launch).run()
    except Exception as e:
        with contextlib.suppress(OSError):
            StartEventWriter(Path(launch.events_path))(_unexpected(e))
        raise


def _unexpected(error: Exception) -> StartEvent:
    first = str(error).strip().partition("\n")[0]
    return StageFailed("start", f"{type(error).__name__}: {first}")


if __name__ == "__main__":
    status = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # Ray's exit handlers take seconds to stop what the guardian kills at once.
    os._exit(status)
