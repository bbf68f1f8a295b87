"""What is shown of a decode worker's speculation."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from router.overview.figures import Page, gauge
from router.overview.window import Window

SpeculationState: TypeAlias = Literal["active", "dropped"]


class SpeculationView(msgspec.Struct, frozen=True, kw_only=True):
    """``acceptance``: of the tokens that were drafted; ``tokens_per_step``: of a sequence, steps
    without drafts included; speed-ups: of the steps with drafts."""

    state: SpeculationState
    proposer: str = ""  # empty where it was dropped; the worker's log says why
    acceptance: float | None = None
    tokens_per_draft: float | None = None  # that were proposed
    tokens_per_step: float | None = None
    predicted_speedup: float | None = None
    measured_speedup: float | None = None


def speculation(target: str, page: Page, window: Window) -> SpeculationView | None:
    """None where it is off."""
    proposers = [s.labels.get("proposer", "") for s in page.get("baton_spec_decode_active", ())]
    if not proposers and not gauge(page, "baton_spec_decode_drops_total"):
        return None
    at = [target]
    of_rows = window.ratio(at, "baton_spec_decode_num_accepted_tokens_total", _ROWS)
    active = bool(proposers)
    return SpeculationView(
        state="active" if active else "dropped",
        proposer=proposers[0] if active else "",
        acceptance=window.ratio(at, "baton_spec_decode_num_accepted_tokens_total", _DRAFTED),
        tokens_per_draft=window.ratio(at, _DRAFTED, "baton_spec_decode_num_drafts_total"),
        tokens_per_step=None if of_rows is None else 1.0 + of_rows,
        predicted_speedup=gauge(page, "baton_spec_decode_predicted_speedup") if active else None,
        measured_speedup=gauge(page, "baton_spec_decode_measured_speedup") if active else None,
    )


_ROWS = "baton_decode_rows_total"
_DRAFTED = "baton_spec_decode_num_draft_tokens_total"
