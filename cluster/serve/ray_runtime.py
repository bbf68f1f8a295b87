"""Starts Ray on this machine, or connects to a Ray cluster that runs.

A Ray started here listens on loopback only and asks for a token drawn for this run. It reports
nothing to anyone, writes no log to the terminal, and takes any number of replicas of each kind.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from cluster.local.run_state import write_private
from cluster.serve.bounded_call import call_within, is_call_running
from cluster.serve.replica_kinds import SCALABLE_KINDS, UNLIMITED_RETRIES, resource_name
from protocol.errors import StartupError
from protocol.garbage_collection import without_garbage_collection

_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB; Baton stores nothing large in it
_ANY_NUMBER = 10_000
PRELOADED_MODULE = "cluster.launch.preloaded_modules"
"""What Ray imports in the processes that it starts in advance, in place of an import here."""
_TOKEN_FILE = "ray-token"
_CONNECT_S = 60.0
_DISCONNECT_S = 10.0
_SERVE_START_S = 150.0


def ray_environment(token: str) -> dict[str, str]:
    """Return variables for Ray and Serve; they must be set before either is imported."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        # Despite its name: with 0 the node's address is 127.0.0.1, on Linux too.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_worker_niceness": "0",  # 15 by default: engines would yield to all other processes
        "RAY_SERVE_LOG_TO_STDERR": "1",  # otherwise Serve drops the replicas' output
        "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": str(UNLIMITED_RETRIES),
    }


def _set_environment(token: str) -> None:
    os.environ.pop("RAY_ADDRESS", None)  # may name another cluster
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    os.environ.update(ray_environment(token))


def prepare_environment(run_dir: Path) -> None:
    """Set the environment for a new Ray; its token is drawn and kept in ``run_dir``."""
    token = secrets.token_hex(32)
    write_private(run_dir / _TOKEN_FILE, token.encode())
    _set_environment(token)


def join_environment(run_dir: Path) -> None:
    """Set the environment for the Ray that was started with ``run_dir``. Raises StartupError."""
    try:
        _set_environment((run_dir / _TOKEN_FILE).read_text())
    except OSError as error:
        raise StartupError(f"the cluster's token for Ray cannot be read: {error}") from None


def start_ray(run_dir: Path, *, gpus: int, replicas: int = 1) -> str:
    """Start Ray and return its address. Raises StartupError.

    Ray starts the processes of ``replicas`` replicas and of Serve's controller at once. Call it
    from the main thread: Ray's processes end with the thread that started them."""
    with without_garbage_collection():
        from cluster.serve import ray_internals

    processes = replicas + 1
    os.environ |= {
        "RAY_worker_maximum_startup_concurrency": str(processes),
        "RAY_preload_python_modules": PRELOADED_MODULE,
    }
    folder = run_dir / "ray"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        context = ray_internals.init_ray(
            folder,
            address="local",
            num_cpus=processes,  # a number of slots only, for each of which a process starts
            num_gpus=gpus,
            resources={resource_name(kind): _ANY_NUMBER for kind in SCALABLE_KINDS},
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
        )
    except (RuntimeError, ValueError, OSError, TimeoutError) as e:
        raise StartupError(f"Ray did not start: {e}") from e
    return str(context.address_info["gcs_address"])


@contextlib.contextmanager
def connected_to_ray(address: str) -> Iterator[None]:
    """Make this process a driver of the cluster at ``address``. Raises StartupError."""
    import ray

    def connect() -> None:
        # It warns that SIGTERM keeps its handler where another thread than the main one connects.
        logging.getLogger("ray").setLevel(logging.ERROR)
        ray.init(address=address, log_to_driver=False, configure_logging=False)

    try:
        call_within(_CONNECT_S, "Ray", connect)
    except Exception as error:  # Ray's errors have no common type
        reason = str(error).strip().partition("\n")[0]
        raise StartupError(
            f"no Ray cluster can be reached at {address!r} from this machine: {reason}; run the"
            " command on one of its nodes, with the RAY_AUTH_MODE and RAY_AUTH_TOKEN that `ray"
            " start` had"
        ) from error
    try:
        yield
    finally:
        _disconnect()


def _disconnect() -> None:
    """Leave the cluster. Where a call of Ray hangs, the process ends without Ray's exit handlers,
    which would hang too."""
    import ray

    failed = is_call_running() or sys.exc_info()[0] is not None
    if not is_call_running():
        with contextlib.suppress(StartupError):
            call_within(_DISCONNECT_S, "Ray", ray.shutdown)
    if is_call_running():
        atexit.register(os._exit, int(failed))  # handlers run in reverse order
        atexit.register(sys.stdout.flush)


def node_address() -> str:
    """Return the address by which other nodes reach this one."""
    import ray.util

    address: Any = ray.util.get_node_ip_address
    return str(address())


def declared_resources() -> dict[str, float]:
    """Return the total resources of the cluster's living nodes, by name."""
    import ray

    resources: Any = ray.cluster_resources
    return dict(resources())


def available_resources() -> dict[str, float]:
    """Return the resources that no replica occupies, by name."""
    import ray

    resources: Any = ray.available_resources
    return dict(resources())


def start_serve() -> None:
    """Start Serve without its HTTP proxy: clients talk to the routers."""
    from ray import serve

    config = serve_logging_config()
    start = partial(serve.start, proxy_location="Disabled", logging_config=config)
    call_within(_SERVE_START_S, "Ray Serve", start)


def serve_logging_config() -> dict[str, Any]:
    return {"log_level": "WARNING", "enable_access_log": False}


def dead_process() -> str | None:
    """Return the name of an essential Ray process that has died; None when all are alive."""
    living = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                living.add(child.name())
    return next((name for name in ("gcs_server", "raylet") if name not in living), None)


def replica_errors(run_dir: Path, lines: int = 30) -> str:
    """Return the last lines that replicas wrote to standard error.

    The supervisor copies them to its own log, since Ray's logs are deleted with the run."""
    parts = []
    for path in sorted(run_dir.glob("ray/session_2*/logs/worker-*.err")):
        text = path.read_text(errors="replace").splitlines()
        tail = [line for line in text if not line.startswith((":job_id:", ":actor_name:"))]
        parts += [f"--- {path.name}", *tail[-lines:]] if tail else []
    return "\n".join(parts)


def gpu_count() -> int:
    """Return the number of GPUs of this machine, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0
