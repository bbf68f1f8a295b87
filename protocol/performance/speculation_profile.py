"""What speculation does for a batch: tokens of a sequence in a step, and the seconds of that step.

A worker that drafts reports a ``SpeculationProfile`` of what it has observed. Routers, the sizing
policy, the planner and the simulator ask ``decode_pace`` for the pace of any batch, because drafts
that pay in a small batch may not pay in a large one. The worker itself chooses draft lengths
sequence by sequence (``draft_choice.py``); here all sequences are alike, so that the choice is one
number, which a scan over the places of a draft finds without numpy.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import msgspec

from protocol.performance.step_model import MAX_COEFFICIENT_S, StepModel

MAX_PLACES = 16
"""Most drafts of a sequence in a step that a worker can be set to."""

MAX_NODES = 1 << 20
"""No step verifies more drafts."""


class SpeculationProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance and costs of drafts on one worker, in seconds.

    ``accept``: for each place of a draft, the probability that its token is accepted, given that
    all before it are. ``most_nodes``: drafts of all sequences together in one step.
    """

    accept: tuple[float, ...]
    per_pass_s: float = 0.0  # of the proposer; a sequence's n drafts take n passes
    per_node_s: float = 0.0  # of proposing one draft
    per_sequence_s: float = 0.0  # of proposing for one sequence, whatever the number of its drafts
    per_step_s: float = 0.0  # of a step that verifies, beyond a plain one by the StepModel
    row_s: float = 0.0  # that verifying one draft adds to the model's pass, beyond ``free_rows``
    free_rows: float = 0.0  # rows of a pass, sequences and drafts, that add nothing
    passes_per_node: float = 1.0  # 0: one pass proposes all drafts of a step, as heads do
    most_nodes: int = 256

    @property
    def is_valid(self) -> bool:
        """Whether a worker can have measured this; what comes from a network is not trusted."""
        costs = (
            *(self.per_pass_s, self.per_node_s, self.per_sequence_s, self.per_step_s),
            self.row_s,
        )
        return (
            1 <= len(self.accept) <= MAX_PLACES
            and all(0.0 <= rate <= 1.0 for rate in (*self.accept, self.passes_per_node))
            and all(0.0 <= cost <= MAX_COEFFICIENT_S for cost in costs)
            and 1 <= self.most_nodes <= MAX_NODES
            and 0.0 <= self.free_rows <= MAX_NODES
        )


def parse_speculation(profile: SpeculationProfile | None) -> SpeculationProfile | None:
    """Return the profile of a record or heartbeat; None if it has none or an impossible one."""
    return profile if profile is not None and profile.is_valid else None


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
    profile, or where drafts do not pay, it is a plain step.

    It has the most tokens per second, as ``choose_draft_lengths`` has, over 0 .. n drafts of each
    sequence. If ``most_nodes`` do not suffice for all sequences, some get one draft less. Drafts
    are rows of the step: beyond the rows that were seen they cost as much as sequences do.
    """
    plain_s = model.decode_s(batch, kv_tokens)
    if profile is None or batch <= 0 or plain_s <= 0:
        return DecodePace(1.0, plain_s)
    most = profile.most_nodes / batch
    drafted = batch * min(1.0, most)  # sequences with drafts
    drafting_s = plain_s + profile.per_step_s + drafted * profile.per_sequence_s
    free, row_s, node_s = max(profile.free_rows, batch), profile.row_s, profile.per_node_s
    constant_s = model.constant_s(batch, kv_tokens)
    largest = batch * (1 + len(profile.accept))
    most_tokens, best_s = 1.0, plain_s
    trusted = model.constant_s(largest, kv_tokens) == constant_s
    for place, (gain, tokens, passes_s) in enumerate(_chain(profile)):
        drafts = batch * (place + 1)
        if place + 1 > most:
            share = most - place  # of the sequences that get a draft at this place
            if share <= 0.0:
                break
            tokens -= (1.0 - share) * gain
            drafts = float(profile.most_nodes)
        seconds = drafting_s + passes_s + drafts * node_s
        if batch + drafts > free:
            seconds += (batch + drafts - free) * row_s
        if not trusted:
            seconds += model.constant_s(batch + drafts, kv_tokens) - constant_s
        if tokens * best_s > most_tokens * seconds:
            most_tokens, best_s = tokens, seconds
    return DecodePace(most_tokens, best_s)


@lru_cache(maxsize=1024)
def _chain(profile: SpeculationProfile) -> tuple[tuple[float, float, float], ...]:
    """Return for each place the probability that its draft is accepted, the expected tokens of a
    step with drafts up to it, and the seconds of the proposer's passes."""
    found = []
    gain = tokens = 1.0
    for place, rate in enumerate(profile.accept):
        gain *= rate
        tokens += gain
        passes = math.ceil(min(place + 1, 1 + place * profile.passes_per_node))
        found.append((gain, tokens, passes * profile.per_pass_s))
    return tuple(found)
