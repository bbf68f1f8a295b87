"""Runs the checks of a start and fetches the model, for `baton up`, worker and router."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cluster.doctor import checks
from cluster.doctor import report as show
from cluster.doctor.finding import Check
from cluster.doctor.subject import DoctorSubject
from cluster.local.start_report import StageNote, StartReporter
from cluster.models import locate


def check_and_fetch_model(
    subject: DoctorSubject,
    model_id: str | None,
    report: StartReporter,
    settings: Iterable[Callable[[], object]] = (),
    only: Sequence[Check[Any]] | None = None,
) -> locate.ServedModel:
    """Check that a start can succeed, and return the model, which is downloaded if necessary.

    Notes and the memory plan are reported. ``settings`` are functions that raise StartupError for
    invalid settings. ``only``: run these checks in place of those of a start. Raises StartupError
    with all problems that can be found before the start."""
    notes, plans = checks.preflight(subject, settings, only=only)
    found = locate.resolve_model(subject.model, model_id, report.download, weights=subject.weights)
    if only is None and not plans and subject.pools:  # the model was not on this machine before
        notes, plans = checks.preflight(subject, only=[checks.MODEL, checks.MEMORY])
    for finding in notes:
        report(StageNote(f"{finding.check}: {finding.text}"))
    if plans:
        report.show(show.memory_lines(plans, subject))
    return found
