"""What Serve's controller is asked for directly: it has this in public by HTTP alone, with a
dashboard. Blocks; raises what Ray does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import DeploymentID

from cluster.serve.replica_kinds import APPLICATIONS, Kind, application, class_name


def client() -> Any:
    found = serve.context._get_global_client()
    assert found is not None  # whoever asks has asked Serve before, or is one of its replicas
    return found


def details(timeout_s: float | None = None) -> dict[str, Any]:
    """Applications by name, with all that Serve knows of them; empty: none."""
    # Not the client's own method, which has no deadline.
    asked = client()._controller.get_serve_instance_details.remote()
    found: dict[str, Any] = ray.get(asked, timeout=timeout_s)["applications"]
    return found


def targets(timeout_s: float) -> dict[Kind, int]:
    """Replicas that are wanted of each kind that is deployed."""
    applications = details(timeout_s)
    found: dict[Kind, int] = {}
    for kind in APPLICATIONS:
        deployments = applications.get(application(kind), {}).get("deployments", {})
        if deployments:
            found[kind] = sum(int(each["target_num_replicas"]) for each in deployments.values())
    return found


def asking(kind: Kind, count: int, timeout_s: float) -> Callable[[], None]:
    """A call that asks for so many replicas of a kind, and does not wait for them."""

    def ask() -> None:
        identity = DeploymentID(name=class_name(kind), app_name=application(kind))
        controller = client()._controller
        ray.get(controller.update_deployment_replicas.remote(identity, count), timeout=timeout_s)

    return ask
