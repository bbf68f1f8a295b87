"""What a training has come to, on disk: replaced at once, and taken up again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

Part = nn.Module | torch.optim.Optimizer


def restore(path: Path, recipe: object, parts: Sequence[Part]) -> tuple[int, float]:
    """Take up the checkpoint at ``path``, if there is one: (steps done, seconds spent on them).
    Raises SystemExit for one of another recipe."""
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, weights_only=True)
    if state["recipe"] != recipe:
        raise SystemExit(f"{path} was made with another recipe; remove it to restart")
    for part, saved in zip(parts, state["parts"], strict=True):
        part.load_state_dict(saved)
    return int(state["step"]), float(state["seconds"])


def save(path: Path, recipe: object, parts: Sequence[Part], done: int, seconds: float) -> None:
    """Replace the checkpoint, at once. It holds tensors and plain values only."""
    saved = [part.state_dict() for part in parts]
    state = {"recipe": recipe, "step": done, "seconds": seconds, "parts": saved}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)
