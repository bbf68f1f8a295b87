"""Finds the draft model or the heads that decode workers speculate with.

A missing draft stops no start: the engine reports it and decodes without speculation.
"""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from cluster.local.start_report import StageNote
from cluster.models import download, hub, locate
from cluster.models.hub import HubRepo
from engine.ipc.settings import METHODS_WITH_MODEL, SpeculationSettings
from protocol.errors import StartupError


class DraftReporter(Protocol):
    """What ``resolve_draft`` reports to; a StartReporter is one."""

    def __call__(self, event: StageNote) -> None: ...

    def download(self, done: int, total: int) -> None: ...


def locate_draft(
    settings: SpeculationSettings, served: str | None
) -> tuple[SpeculationSettings, HubRepo | None]:
    """Return ``settings`` with the folder of its model, or the hub repository to fetch it from.

    ``served`` is the model as configured; None is the demo model, which has drafts beside it.
    Raises StartupError for a model that is neither a folder nor a hub id."""
    if settings.model_path is None:
        own = locate.demo_path().parent / settings.method
        wants_own = served is None and settings.method in METHODS_WITH_MODEL
        return replace(settings, model_path=str(own) if wants_own else None), None
    found = locate.locate_model(settings.model_path)
    if found.path is None:
        return settings, found.repo
    return replace(settings, model_path=str(found.path)), None


def resolve_draft(
    settings: SpeculationSettings, served: str | None, report: DraftReporter
) -> SpeculationSettings:
    """Return ``settings`` with the folder of its model, after a download if needed.

    ``settings`` is returned unchanged when the model cannot be found or fetched."""
    try:
        here, repo = locate_draft(settings, served)
    except StartupError:  # the checks before a start have reported it
        return settings
    if repo is None:
        return here
    try:
        path = download.download_snapshot(repo, hub.FILES, report.download)
        return replace(settings, model_path=str(path))
    except StartupError as error:
        report(StageNote(f"speculation: {error}"))
        return settings
