"""The model on the node of a replica: in its folder, or fetched from the hub."""

from __future__ import annotations

from msgspec.structs import replace

from cluster import drafting, models
from cluster.report import on_stderr
from cluster.settings import WorkerSettings
from router.settings import RouterSettings


def worker_model(settings: WorkerSettings) -> WorkerSettings:
    """``settings`` with folders of this node; "" stands for the demo model. Raises StartupError."""
    wanted = settings.model_path or None
    with on_stderr() as report:
        found = models.resolve(wanted, settings.model_id or None, report.download)
        drafts = settings.speculation
        if settings.role == "decode":
            drafts = drafting.resolve(drafts, wanted, report)
    return replace(settings, model_path=str(found.path), model_id=found.id, speculation=drafts)


def router_model(settings: RouterSettings) -> RouterSettings:
    """Likewise."""
    with on_stderr() as report:
        wanted = settings.model_path or None
        found = models.resolve(wanted, settings.model_id or None, report.download)
    return replace(settings, model_path=str(found.path), model_id=found.id)
