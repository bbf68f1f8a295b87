"""The training recipe: its numbers, the learning rate they give, and the optimizers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.demo.models import Llama


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, besides the text and the models' shapes."""

    steps: int = 1600
    long_steps: int = 215  # the last steps, on windows of MAX_LEN tokens
    batch_tokens: int = 8192
    window: int = 512
    warmup: int = 60
    decay_steps: int = 485  # the last steps on short windows, falling from lr to long_lr
    lr: float = 3e-3
    long_lr: float = 5.75e-4
    weight_decay: float = 0.1
    cut_anywhere: float = 1 / 300  # see tokenizer.encode()
    long_cut_after_space: float = 1 / 12
    seed: int = 1


def learning_rate(step: int, recipe: Recipe) -> float:
    """Warm up, hold, fall linearly to ``long_lr``; on the long windows, fall linearly to zero."""
    left = recipe.steps - step
    if left <= recipe.long_steps:
        return recipe.long_lr * left / recipe.long_steps
    warm = recipe.lr * (step + 1) / recipe.warmup
    fallen = min(1.0, (left - recipe.long_steps) / recipe.decay_steps)
    return min(warm, recipe.long_lr + (recipe.lr - recipe.long_lr) * fallen)


def make_optimizers(model: Llama, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon (PyTorch's own) for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(
        matrices,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(others, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]
