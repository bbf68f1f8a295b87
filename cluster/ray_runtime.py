"""Ray on this machine only: the environment it reads, its start, and Serve's front proxy.

What is set here, and why:

- everything but the front listens on loopback, and asks for a token that is drawn for this run;
- HAProxy instead of the Python proxy: a streamed token costs 0.1 ms of CPU instead of 0.9 ms;
- a reload of HAProxy must not cut streams that run (ray-project/ray#66056): old processes may stay
  for as long as a request can last. Tried with routers going 1, 3, 1, 2, 1 under load: none was;
- nothing is reported to anyone, and no log goes to the terminal.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from cluster import ports
from protocol.errors import StartupError

if TYPE_CHECKING:
    from cluster.front import Front

_LONGEST_REQUEST_S = 3600
_HEAD_ROOM = 56 * 1024  # for a request's head: more than routers take; they say what is wrong
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB; nothing of size goes through it


def environment(run_dir: Path) -> dict[str, str]:
    """Variables for Ray and Serve; must be in ``os.environ`` before either is imported."""
    folder = run_dir / "proxy"
    stats, metrics, fallback = ports.any_free("127.0.0.1", 3)
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Despite its name: with 0 the node's address is 127.0.0.1, on Linux too.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_worker_niceness": "0",  # 15 by default: engines would yield to everything else
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(folder / "haproxy"),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(_HEAD_ROOM),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(_LONGEST_REQUEST_S),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(_LONGEST_REQUEST_S),
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": str(_LONGEST_REQUEST_S),
        # Time for HAProxy to take a leaving router out; the router then waits for its requests.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def prepare(run_dir: Path, front: Front) -> None:
    """Sets the environment of this process and of all that it starts."""
    from cluster.front import write_haproxy_shim

    os.environ.pop("RAY_ADDRESS", None)  # someone else's cluster
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    write_haproxy_shim(run_dir / "proxy", front)
    os.environ.update(environment(run_dir))


def start(run_dir: Path, *, gpus: int) -> None:
    """Starts Ray. From the main thread: Ray's processes are tied to the life of the caller's."""
    import ray

    folder = run_dir / "ray"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        ray.init(
            address="local",
            num_cpus=2,  # only a count of slots; more would start more idle processes
            num_gpus=gpus,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(folder),
        )
    except (RuntimeError, ValueError, OSError, TimeoutError) as e:
        raise StartupError(f"Ray did not start: {e}") from e


def keep_replica_on_loopback() -> None:
    """In a replica, while it is being made: its internal gRPC port is one of loopback, where those
    who call it are; Serve would open it to every interface (ray 2.60.0), and has no setting."""
    import ray.serve._private.replica

    replica: Any = ray.serve._private.replica
    add_port = replica.add_port_to_grpc_server
    if getattr(add_port, "__module__", "") == __name__:
        return  # once

    def on_loopback(server: Any, _address: str) -> int:
        return int(add_port(server, "127.0.0.1:0"))

    replica.add_port_to_grpc_server = on_loopback


def start_serve(port: int) -> None:
    """Starts Serve and its proxy; the host is for the shim to set."""
    from ray import serve

    serve.start(
        http_options={
            "host": "127.0.0.1",
            "port": port,
            "location": "HeadOnly",
            "keep_alive_timeout_s": 300,
        },
        logging_config=logging_config(),
    )


def logging_config() -> dict[str, Any]:
    return {"log_level": "WARNING", "enable_access_log": False}


def shutdown() -> None:
    """Ends Ray's processes."""
    import ray

    ray.shutdown()


def dead_process() -> str | None:
    """Name of a process that Ray cannot do without and that has died; None when all live."""
    living = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                living.add(child.name())
    return next((name for name in ("gcs_server", "raylet") if name not in living), None)


def replica_errors(run_dir: Path, lines: int = 30) -> str:
    """The end of what replicas wrote to standard error, for the log: Ray's go with the run."""
    parts = []
    for path in sorted(run_dir.glob("ray/session_2*/logs/worker-*.err")):
        text = path.read_text(errors="replace").splitlines()
        tail = [line for line in text if not line.startswith((":job_id:", ":actor_name:"))]
        parts += [f"--- {path.name}", *tail[-lines:]] if tail else []
    return "\n".join(parts)


def gpu_count() -> int:
    """GPUs of this machine, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0
