"""What speculation does for a batch: tokens of a sequence in a step, and the seconds of that step.

A worker reports a ``SpeculationProfile`` of what it has observed. Routers, the sizing policy, the
planner and the simulator ask ``decode_pace`` for the pace of any batch, because drafts that pay in
a small batch may not in a large one. The choice of draft lengths is the worker's own
(``draft_choice.py``), for a batch whose sequences are all alike.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from protocol.performance.draft_choice import BatchCosts, Vector, choose_draft_lengths
from protocol.performance.step_model import StepModel

MAX_PLACES = 16
"""Most drafts of a sequence in a step that a worker can be set to."""


class SpeculationProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance and costs of drafts on one worker, in seconds.

    ``accept``: for each place of a draft, the probability that its token is accepted, given that
    all before it are. ``most_nodes``: drafts of all sequences together in one step.
    """

    accept: tuple[float, ...]
    per_pass_s: float = 0.0  # of the proposer; a sequence's n drafts take n passes
    per_node_s: float = 0.0  # of proposing one draft
    row_s: float = 0.0  # that verifying one draft adds to the model's pass
    passes_per_node: float = 1.0  # 0: one pass proposes all drafts of a step, as heads do
    most_nodes: int = 256


class DecodePace(NamedTuple):
    """A step of a batch. ``seconds / tokens`` is the time between two tokens of a sequence."""

    tokens: float  # of each sequence, at least 1
    seconds: float

    @property
    def tpot_s(self) -> float:
        return self.seconds / self.tokens


def decode_pace(
    model: StepModel, profile: SpeculationProfile | None, batch: float, kv_tokens: float
) -> DecodePace:
    """Return the best step over ``batch`` equal sequences that hold ``kv_tokens`` in all. Without a
    profile, or where drafts do not pay, it is a plain step."""
    plain = model.decode_s(batch, kv_tokens)
    if profile is None or batch <= 0 or plain <= 0:
        return DecodePace(1.0, plain)
    places = min(len(profile.accept), int(profile.most_nodes / batch))
    if not places:
        return DecodePace(1.0, plain)
    nodes: Vector = np.arange(places + 1.0)
    passes = np.ceil(np.minimum(nodes, 1 + (nodes - 1) * profile.passes_per_node))
    costs = BatchCosts(
        plain=plain,
        verify=np.asarray(plain + batch * profile.row_s * nodes, dtype=np.float64),
        passes=passes.astype(np.int64),
        per_pass=profile.per_pass_s,
        per_node=batch * profile.per_node_s,
    )
    gains: Vector = np.multiply.accumulate(np.array([profile.accept[:places]]), axis=1)
    choice = choose_draft_lengths(gains, np.ones_like(gains), costs)
    if choice.speedup <= 1.0:
        return DecodePace(1.0, plain)
    return DecodePace(choice.tokens, choice.seconds)
