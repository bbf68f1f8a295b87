"""How the heads are trained: the numbers of a recipe, and the optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import nn

from engine.demo.heads_losses import eagle_losses, medusa_losses
from engine.demo.heads_models import EagleHead, MedusaHeads
from engine.demo.models import Llama
from engine.demo.tokenizer import VOCAB_SIZE

Kind: TypeAlias = Literal["medusa", "eagle"]

MEDUSA_HEADS = 3
MEDUSA_BLOCKS = 1


@dataclass(frozen=True)
class HeadRecipe:
    """Everything that decides a head's weights, besides the text and the target."""

    kind: Kind
    steps: int
    batch_tokens: int = 4096
    window: int = 512
    warmup: int = 20
    lr: float = 2e-3
    decay: float = 0.6  # the last share of the steps, falling to zero
    own_share: int = 3  # one batch of so many is the target's own text
    own_prompts: int = 2048
    own_tokens: int = 192
    segments: tuple[int, ...] = (128, 512)  # that an EAGLE head attends to, in turns
    unrolled: int = 2  # steps of an EAGLE head that follow each other
    seed: int = 1


RECIPES = {"medusa": HeadRecipe("medusa", 320), "eagle": HeadRecipe("eagle", 500, lr=4e-3)}


def learning_rate(step: int, recipe: HeadRecipe) -> float:
    """Warm up, hold, fall linearly to zero."""
    left = (recipe.steps - step) / (recipe.steps * recipe.decay)
    return recipe.lr * min(1.0, (step + 1) / recipe.warmup, left)


def make_head(recipe: HeadRecipe, target: Llama) -> nn.Module:
    """An untrained head for the target."""
    if recipe.kind == "medusa":
        return MedusaHeads(MEDUSA_HEADS, MEDUSA_BLOCKS, target)
    return EagleHead(target.shape, recipe.seed)


def losses(
    head: nn.Module, target: Llama, ids: torch.Tensor, recipe: HeadRecipe, step: int
) -> list[torch.Tensor]:
    """What to make small, by head or by unrolled step; ids: [batch, window + 1]."""
    if isinstance(head, MedusaHeads):
        return medusa_losses(head, target, ids)
    assert isinstance(head, EagleHead)
    segment = recipe.segments[step % len(recipe.segments)]
    return eagle_losses(head, target, ids, min(segment, recipe.window), recipe.unrolled)


def make_optimizers(head: nn.Module, recipe: HeadRecipe) -> list[torch.optim.Optimizer]:
    """Muon (PyTorch's own) for the matrices of layers, AdamW for what reads tokens and the rest."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for p in head.parameters():
        (matrices if p.ndim == 2 and len(p) != VOCAB_SIZE else others).append(p)
    return [
        torch.optim.Muon(matrices, lr=recipe.lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
