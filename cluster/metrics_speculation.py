"""What a decode worker tells of speculation, under vLLM's names where it has one.

Tokens that a sequence gets of a step, on average: 1 + num_accepted_tokens / decode_rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from cluster.metric_families import LABELS, counter, counter_by, gauge
from engine.counters import Counters, SpecFigures


def speculation(
    done: Counters, now: SpecFigures, labels: list[str], replica: str
) -> Iterator[Metric]:
    """``labels``: model and role."""
    spec = done.speculation
    yield counter("decode_rows", "Sequences that decoded, of all steps", labels, done.decode_rows)
    for name, text, count in (
        ("steps", "Steps with drafts", spec.steps),
        ("num_drafts", "Drafts: each sequence that a step proposed tokens to", spec.drafts),
        ("num_draft_tokens", "Tokens proposed", spec.draft_tokens),
        ("num_accepted_tokens", "Tokens accepted", spec.accepted_tokens),
        ("draft_seconds", "Seconds of proposing", spec.draft_seconds),
    ):
        yield counter(f"spec_decode_{name}", text, labels, count)
    name, text = "num_accepted_tokens_per_pos", "Tokens accepted, by their place in the draft"
    by_place = ((str(place), count) for place, count in enumerate(spec.accepted_beyond))
    yield counter_by("position", f"spec_decode_{name}", text, labels, by_place)
    drops = (("load", spec.load_failures), ("crash", spec.crashes))
    text = "Proposers given up: they could not be loaded, or failed at work"
    yield counter_by("reason", "spec_decode_drops", text, labels, drops)
    if now.active:
        yield from _active(now, [*labels, replica])


def _active(now: SpecFigures, labels: list[str]) -> Iterator[Metric]:
    active = GaugeMetricFamily(
        "baton_spec_decode_active",
        "1: this proposes",
        labels=[*LABELS, "replica", "proposer"],
    )
    active.add_metric([*labels, now.proposer], 1)
    yield active
    of = "Tokens per second of steps with drafts, over plain ones"
    yield gauge("spec_decode_predicted_speedup", f"{of}: predicted", labels, now.predicted_speedup)
    yield gauge("spec_decode_measured_speedup", f"{of}: measured", labels, now.measured_speedup)
