"""Before anything loads: the checks, the model on this machine, and a word on memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cluster.doctor import checks
from cluster.doctor import report as show
from cluster.doctor.subject import Wanted
from cluster.local.start_report import Note, Reporter
from cluster.models import models


def prepare(
    wanted: Wanted,
    model_id: str | None,
    report: Reporter,
    settings: Iterable[Callable[[], object]] = (),
) -> models.Model:
    """The model, fetched if need be. ``settings`` raise StartupError for what makes no sense.

    Raises StartupError with every problem that can be known."""
    notes, plans = checks.check(wanted, settings)
    found = models.resolve(wanted.model, model_id, report.download)
    if not plans and wanted.pools:  # it was not here before
        notes, plans = checks.check(wanted, model_only=True)
    for finding in notes:
        report(Note(f"{finding.check}: {finding.text}"))
    if plans:
        report.show(show.memory_lines(plans, wanted))
    return found
