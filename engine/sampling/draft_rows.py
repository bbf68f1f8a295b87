"""The rows of a step that verifies drafts: several of a sequence, each after drafts of its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DraftRows:
    """The rows of a verification, packed by sequence: the row of its last token, then its nodes."""

    owner: Tensor  # [R] int64, index into ``drawing`` of each row
    depth: Tensor  # [R] int64, 0 for the row of the last token
    ancestors: Tensor  # [R, D] int64, draft tokens from the root down to the row, padded with -1
