"""Says what a larger `max_batch` of the decode workers would save, where it is what binds a plan."""

from __future__ import annotations

from msgspec.structs import replace

from cluster.planner.plan import DeploymentPlan
from cluster.planner.pools import MAX_BATCH_BOUND, size_pools

_ON_A_GPU = 256  # sequences: what a worker on a GPU takes by default


def batch_advice(plan: DeploymentPlan) -> list[str]:
    """Return a sentence on the decode workers that a larger batch needs: the default of a worker on
    a GPU, or twice the present one. Empty where another bound binds or no worker is saved."""
    ceilings, now = plan.sized.ceilings, plan.sized.pools["decode"].workers
    if ceilings.binds != "max_batch":
        return []
    larger = _ON_A_GPU if ceilings.max_batch < _ON_A_GPU else 2 * ceilings.max_batch
    if larger > MAX_BATCH_BOUND:
        return []
    sized = size_pools(replace(plan.wanted, max_batch=larger))
    needed, tpot_ms = sized.pools["decode"].workers, sized.predicted.tpot_s
    if needed >= now:
        return []
    pace = "" if tpot_ms is None else f", at a mean TPOT of {tpot_ms * 1e3:.3g} ms"
    return [
        f"max_batch {ceilings.max_batch} binds the decode pool: max_batch {larger} would need"
        f" {needed} decode workers instead of {now}{pace} (--max-batch {larger})."
    ]
