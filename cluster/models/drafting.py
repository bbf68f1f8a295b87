"""The draft model or the heads that decode workers speculate with: on this machine, or fetched.

What is wrong with them keeps no cluster from starting: the engine says what, and goes on without.
"""

from __future__ import annotations

from msgspec.structs import replace

from cluster.local.start_report import Note, Reporter
from cluster.models import hub, models
from cluster.models.hub import Repo
from engine.ipc.spec import WITH_MODEL, SpeculationSpec
from protocol.errors import StartupError


def located(spec: SpeculationSpec, served: str | None) -> tuple[SpeculationSpec, Repo | None]:
    """``spec`` with the folder of its model, and where to fetch that from if it is not here.
    ``served``: the model as configured; the demo model has drafts of its own beside it.

    Raises StartupError for what is neither a folder nor a hub id."""
    if spec.model_path is None:
        own = models.demo_path().parent / spec.method
        wants_own = served is None and spec.method in WITH_MODEL
        return replace(spec, model_path=str(own) if wants_own else None), None
    found = models.locate(spec.model_path)
    if found.path is None:
        return spec, found.repo
    return replace(spec, model_path=str(found.path)), None


def resolve(spec: SpeculationSpec, served: str | None, report: Reporter) -> SpeculationSpec:
    """The same, fetched from the hub if need be; what cannot be had stays as it was given."""
    try:
        here, repo = located(spec, served)
    except StartupError:  # the checks before a start have said so
        return spec
    if repo is None:
        return here
    try:
        return replace(spec, model_path=str(hub.download(repo, hub.FILES, report.download)))
    except StartupError as error:
        report(Note(f"speculation: {error}"))
        return spec
