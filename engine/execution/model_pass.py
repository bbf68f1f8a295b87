"""Holds what the model computed in one step, from the stepper's pass until tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from engine.kernels.paged_rows import PagedRows
from engine.scheduling.sequence import Sequence

if TYPE_CHECKING:  # only an installation for GPUs has Triton, which this module imports
    from engine.execution.device_verifier import TokensOnTheWay


class DecodeInputs(NamedTuple):
    """The decode rows of a pass on the device, for verifying drafts there."""

    rows: PagedRows
    positions: Tensor  # [>= R] int64
    drafts: Tensor  # [nodes] int64, tokens of the draft nodes


@dataclass
class ModelPass:
    """What the model computed in a step. A recorded graph has more rows than the step."""

    rows: Tensor  # [B] int64, state rows of the sequences that draw
    hidden: Tensor  # [T, hidden], the last layer's output for all rows
    last_hidden: Tensor  # [R, hidden], for the rows with logits
    logits: Tensor  # [R, vocab] fp32
    taps: list[Tensor]  # [R, hidden] each
    inputs: DecodeInputs | None
    tokens: TokensOnTheWay | None  # drawn in the graph as if all rows were plain

    def select_rows_(self, at: Tensor) -> None:
        """Keep the rows ``at`` [R] only."""
        self.last_hidden, self.logits = self.last_hidden[at], self.logits[at]
        self.taps = [tap[at] for tap in self.taps]


class StepAhead(NamedTuple):
    """A step that was launched before the tokens of the step before it were read."""

    sequences: tuple[Sequence, ...]
    leases: list[int]
    passed: ModelPass
