"""What `baton status` and ``/ui`` show, worked out from the pages: an Overview.

``None`` stands for what was not observed, or cannot be told from one look. Times in seconds.
"""

from __future__ import annotations

import msgspec

from router.overview.autoscaler_view import AutoscalerView, autoscaler_view
from router.overview.figures import Moment
from router.overview.pages import Seen
from router.overview.router_view import RouterView, router_view
from router.overview.verdict import Verdict, verdict
from router.overview.walls import WallView, wall_views
from router.overview.window import Window
from router.overview.worker_view import WorkerView, worker_view


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """``window_s``: what rates, times and ratios are of; None: since each process started."""

    cluster: str
    model: str
    url: str
    window_s: float | None
    verdict: Verdict
    router: RouterView
    workers: list[WorkerView]
    walls: list[WallView] = []  # of the pools
    autoscaler: AutoscalerView | None = None  # None: there is none


def overview(url: str, seen: Seen, before: Moment | None, now_s: float) -> Overview:
    """``before``: the beginning of the window. ``now_s``: since the epoch."""
    window = Window(seen.moment, before, now_s)
    of = [group for group in seen.groups if group.about("role") == "router"]
    router = router_view([group.target for group in of], seen.moment, window, now_s)
    among = [group for group in seen.groups if group.about("role") in ("prefill", "decode")]
    workers = [worker_view(group, seen, window) for group in among]
    first = seen.groups[0] if seen.groups else None
    return Overview(
        cluster=first.about("cluster") if first else "",
        model=first.about("model") if first else "",
        url=url,
        window_s=window.seconds,
        verdict=verdict(router, workers, window.seconds),
        router=router,
        walls=wall_views([p for g in of if (p := seen.moment.pages.get(g.target))]),
        autoscaler=autoscaler_view(seen.groups, seen),
        workers=sorted(workers, key=lambda w: (w.role != "prefill", w.instance)),
    )
