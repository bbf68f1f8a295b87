"""Ray: on this machine, started here; or a cluster that runs, to be connected to.

What is set for one on this machine, and why:

- it listens on loopback, and asks for a token that is drawn for this run;
- nothing is reported to anyone, and no log goes to the terminal;
- of each kind of replica it takes any number.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from cluster.local.run_state import write_private
from cluster.serve.replica_kinds import KINDS, NEVER_GIVE_UP, resource
from protocol.errors import StartupError

_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB; nothing of size goes through it
_ANY_NUMBER = 10_000
_TOKEN_FILE = "ray-token"


def environment(token: str) -> dict[str, str]:
    """Variables for Ray and Serve; must be in ``os.environ`` before either is imported."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        # Despite its name: with 0 the node's address is 127.0.0.1, on Linux too.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_worker_niceness": "0",  # 15 by default: engines would yield to everything else
        "RAY_SERVE_LOG_TO_STDERR": "1",  # else Serve takes what replicas say, and drops it
        "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": str(NEVER_GIVE_UP),
    }


def _adopt(token: str) -> None:
    """Sets the environment of this process and of all that it starts."""
    os.environ.pop("RAY_ADDRESS", None)  # someone else's cluster
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    os.environ.update(environment(token))


def prepare(run_dir: Path) -> None:
    """The same, with a token that is drawn now, and left in ``run_dir`` for ``prepare_again``."""
    token = secrets.token_hex(32)
    write_private(run_dir / _TOKEN_FILE, token.encode())
    _adopt(token)


def prepare_again(run_dir: Path) -> None:
    """For another process that wants to talk to the same Ray. Raises StartupError."""
    try:
        _adopt((run_dir / _TOKEN_FILE).read_text())
    except OSError as error:
        raise StartupError(f"the cluster's token for Ray cannot be read: {error}") from None


def start(run_dir: Path, *, gpus: int) -> str:
    """Starts Ray; its address. From the main thread: Ray's processes are tied to the life of the
    caller's."""
    import ray

    folder = run_dir / "ray"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        context: Any = ray.init(
            address="local",
            num_cpus=2,  # only a count of slots; more would start more idle processes
            num_gpus=gpus,
            resources={resource(kind): _ANY_NUMBER for kind in KINDS},
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(folder),
        )
    except (RuntimeError, ValueError, OSError, TimeoutError) as e:
        raise StartupError(f"Ray did not start: {e}") from e
    return str(context.address_info["gcs_address"])


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Within it, this process is a driver of the cluster at ``address``. Raises StartupError."""
    import ray

    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray has no common type for them
        reason = str(error).strip().partition("\n")[0]
        raise StartupError(
            f"no Ray cluster can be reached at {address!r} from this machine: {reason}; this must"
            " run on a node of it, with RAY_AUTH_MODE and RAY_AUTH_TOKEN as `ray start` had them"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def node_address() -> str:
    """This node's, as the others reach it."""
    import ray.util

    address: Any = ray.util.get_node_ip_address
    return str(address())


def declared() -> dict[str, float]:
    """All resources of the cluster's living nodes, by name."""
    import ray

    resources: Any = ray.cluster_resources
    return dict(resources())


def available() -> dict[str, float]:
    """What of them no replica has."""
    import ray

    resources: Any = ray.available_resources
    return dict(resources())


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


def start_serve() -> None:
    """Starts Serve, without a proxy: clients talk to routers."""
    from ray import serve

    serve.start(proxy_location="Disabled", logging_config=logging_config())


def logging_config() -> dict[str, Any]:
    return {"log_level": "WARNING", "enable_access_log": False}


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
