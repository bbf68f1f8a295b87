"""Ray Serve's own policy, ongoing requests to replicas, in the place of Baton's.

Serve calls it for each deployment by itself, with the requests that run and wait there, averaged
over a look back; so it is called here, for each pool, with what its workers say that they run and
have waiting. It knows no loans.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from ray.serve._private.common import DeploymentID
from ray.serve.autoscaling_policy import (
    _apply_autoscaling_config,
    replica_queue_length_autoscaling_policy,
)
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from cluster.settings import ROLES, Role
from cluster.sizing.decision import Decision
from cluster.sizing.snapshot import Counts, Snapshot

LOOK_BACK_S, UP_DELAY_S, DOWN_DELAY_S = 30.0, 30.0, 600.0
"""Ray's defaults (2.60)."""


class Wanted(NamedTuple):
    """Ongoing requests of each replica."""

    prefill: float
    decode: float


class OngoingRequests:
    """``note`` what is under way, again and again; then call it. ``quicker``: all of Serve's
    delays are divided by it."""

    def __init__(self, wanted: Wanted, quicker: float) -> None:
        self._config = {role: _config(getattr(wanted, role), quicker) for role in ROLES}
        self._state: dict[Role, dict[str, Any]] = {role: {} for role in ROLES}
        self._look_back_s = LOOK_BACK_S / quicker
        self._policy = _apply_autoscaling_config(replica_queue_length_autoscaling_policy)
        self._seen: deque[tuple[float, Mapping[Role, int]]] = deque()

    def note(self, at_s: float, ongoing: Mapping[Role, int]) -> None:
        """Requests that run and wait in each pool."""
        self._seen.append((at_s, ongoing))
        while self._seen[0][0] < at_s - self._look_back_s:
            self._seen.popleft()

    def __call__(self, snapshot: Snapshot) -> Decision:
        asked = {role: self._one(role, snapshot) for role in ROLES}
        limits = snapshot.limits
        within = {
            role: max(limits.least.of(role), min(limits.most.of(role), asked[role]))
            for role in ROLES
        }
        while limits.gpus is not None and sum(within.values()) > limits.gpus:
            within[max(ROLES, key=lambda role: within[role])] -= 1
        targets = Counts(**within)
        return Decision(
            wanted=targets,
            targets=targets,
            reason="steady" if targets == snapshot.targets else "demand",
            text=f"ongoing: {self._ongoing('prefill'):.1f}, {self._ongoing('decode'):.1f}",
            memory=snapshot.memory,
        )

    def _ongoing(self, role: Role) -> float:
        return sum(seen[role] for _, seen in self._seen) / max(1, len(self._seen))

    def _one(self, role: Role, snapshot: Snapshot) -> int:
        running = [w for w in snapshot.workers if w.role == role and w.state != "leaving"]
        context = AutoscalingContext(
            deployment_id=DeploymentID(role, role),
            deployment_name=role,
            app_name=role,
            current_num_replicas=len(running),
            target_num_replicas=snapshot.targets.of(role),
            running_replicas=[],
            total_num_requests=self._ongoing(role),
            total_queued_requests=0.0,
            aggregated_metrics={},
            raw_metrics={},
            capacity_adjusted_min_replicas=snapshot.limits.least.of(role),
            capacity_adjusted_max_replicas=snapshot.limits.most.of(role),
            policy_state=self._state[role],
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=None,
            config=self._config[role],
        )
        count, self._state[role] = self._policy(context)
        return int(count)


def _config(ongoing: float, quicker: float) -> AutoscalingConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an interval that Serve has elsewhere from now on
        return AutoscalingConfig(
            target_ongoing_requests=ongoing,
            upscale_delay_s=UP_DELAY_S / quicker,
            downscale_delay_s=DOWN_DELAY_S / quicker,
            look_back_period_s=LOOK_BACK_S / quicker,
            metrics_interval_s=LOOK_BACK_S / quicker / 3,
            max_replicas=10_000,
        )
