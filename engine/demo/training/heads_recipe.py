"""How the heads are trained: the numbers of a recipe, and the optimizers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.demo.training.corpus import VOCAB_SIZE, Packer, Tokens
from engine.demo.training.heads_networks import EagleHead, Keys, MedusaHeads, eagle_step, features
from engine.demo.training.networks import Llama
from engine.demo.training.train_loop import Part, restore, save

# MERGED engine.demo.heads_losses
# What the heads are trained on: to say what the target says, further on.

FEATURE_WEIGHT = 0.5
"""Of the features' loss beside the predictions' (EAGLE, section 4.2)."""


ROWS = 128
"""Predictions that are compared at a time, so that they stay in a cache."""


class _Divergence(torch.autograd.Function):
    """Cross-entropy of what is read from rows with what the target reads from others, and its
    gradients at once: neither's predictions are ever there as a whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reading: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
        """x, wanted: [rows, hidden]; reading, weight: [vocab, hidden]; the average over rows."""
        total, gradients = x.new_zeros((), dtype=torch.float32), []
        learns = ctx.needs_input_grad[1]
        gradient = torch.zeros_like(reading, dtype=torch.float32) if learns else None
        for rows, meant in zip(x.split(ROWS), wanted.split(ROWS), strict=True):
            p = F.linear(meant, weight).float().softmax(-1)
            logits = F.linear(rows, reading).float()
            normalizer = logits.logsumexp(-1, keepdim=True)
            total += (normalizer - (p * logits).sum(-1, keepdim=True)).sum()
            error = logits.sub_(normalizer).exp_().sub_(p).to(x.dtype)
            gradients.append(error @ reading)
            if gradient is not None:
                gradient += error.t() @ rows
        ctx.save_for_backward(torch.cat(gradients).div_(len(x)))
        ctx.gradient = None if gradient is None else gradient.div_(len(x))
        return total / len(x)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        of_reading = None if ctx.gradient is None else ctx.gradient * outer
        return ctx.saved_tensors[0] * outer, of_reading, None, None


def divergence(x: Tensor, wanted: Tensor, target: Llama, reading: Tensor | None = None) -> Tensor:
    """Cross-entropy of the predictions that ``reading`` [vocab, hidden] makes of features ``x``
    with those that the target makes of ``wanted``, both of any one shape [..., hidden]; None: the
    target reads both. Products are made in bfloat16."""
    weight = target.model.embed_tokens.weight.bfloat16()
    with torch.autocast("cpu", enabled=False):
        rows, meant = x.flatten(0, -2).bfloat16(), wanted.flatten(0, -2).bfloat16()
        read = weight if reading is None else reading.bfloat16()
        loss: Tensor = _Divergence.apply(rows, read, meant, weight)  # type: ignore[no-untyped-call]
    return loss


def teach(target: Llama, ids: Tensor) -> Tensor:
    """The target's features of ids [batch, length]: [batch, length, hidden]."""
    with torch.no_grad():
        return features(target, ids)


def medusa_losses(heads: MedusaHeads, target: Llama, ids: Tensor) -> list[Tensor]:
    """Of each head: how it foretells at t what the target predicts at t + 1 + i."""
    seen = teach(target, ids)
    losses = []
    for i, head in enumerate(heads):
        assert isinstance(head, nn.Sequential)
        x, reading = head[:-1](seen[:, : -1 - i]), head[-1].weight
        assert isinstance(reading, Tensor)
        losses.append(divergence(x, seen[:, 1 + i :], target, reading))
    return losses


def eagle_losses(
    head: EagleHead, target: Llama, ids: Tensor, segment: int, steps: int
) -> list[Tensor]:
    """Of each unrolled step. The head attends within segments of a text, because in use it does
    not know what came before: ids [batch, n * segment + 1]."""
    seen = teach(target, ids)

    def cut(x: Tensor) -> Tensor:
        out: Tensor = x.unflatten(1, (-1, segment)).flatten(0, 1)
        return out

    before, after = cut(seen[:, :-1]), cut(seen[:, 1:])
    embedded = target.model.embed_tokens(cut(ids[:, 1:])).detach()
    cos, sin = target.cos[:segment], target.sin[:segment]
    losses, keys, known = [], Keys(), before
    for step in range(steps):
        out = eagle_step(head, keys, head.join(embedded, known), cos, sin)
        loss = divergence(out[:, step:], after[:, step:], target)
        gap = F.smooth_l1_loss(out[:, step:].float(), after[:, step:].float())
        losses.append(loss + FEATURE_WEIGHT * gap)
        known = torch.cat((before[:, :1], out[:, :-1]), 1)
    return losses


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


# MERGED engine.demo.heads_loop
# The training loop of a head, with a checkpoint to resume from.


class HeadBatches:
    """The batch of each step: corpus, and now and then what the target made of it."""

    def __init__(self, docs: list[Tokens], own: list[Tokens], recipe: HeadRecipe) -> None:
        rows = max(1, recipe.batch_tokens // recipe.window)
        self._packers = [
            Packer(docs, recipe.window, rows, recipe.seed),
            Packer(own, recipe.window, rows, recipe.seed + 1),
        ]
        self._share = recipe.own_share

    def __call__(self, step: int) -> Tensor:
        """Token ids [rows, window + 1]."""
        turn, at = divmod(step, self._share)
        own = at == self._share - 1
        x, y = self._packers[own](turn if own else turn * (self._share - 1) + at)
        return torch.cat((x, y[:, -1:]), 1)


class HeadTrainer:
    """One head in training, the target beside it; only the head learns."""

    def __init__(self, target: Llama, recipe: HeadRecipe, checkpoint: Path) -> None:
        self.target, self.recipe, self.checkpoint = target.requires_grad_(False), recipe, checkpoint
        self.head = make_head(recipe, target)
        self.optimizers = make_optimizers(self.head, recipe)
        self.parts: list[Part] = [self.head, *self.optimizers]

    def restore(self) -> tuple[int, float]:
        """Take up the checkpoint, if there is one: (steps done, seconds spent on them)."""
        return restore(self.checkpoint, repr(asdict(self.recipe)), self.parts)

    def save(self, done: int, seconds: float) -> None:
        """Replace the checkpoint, at once."""
        save(self.checkpoint, repr(asdict(self.recipe)), self.parts, done, seconds)

    def step(self, ids: Tensor, step: int) -> list[float]:
        """One update; the losses before it."""
        with torch.autocast("cpu", torch.bfloat16):
            parts = losses(self.head, self.target, ids, self.recipe, step)
        torch.autograd.backward(torch.stack(parts).sum())
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, self.recipe)
            optimizer.step()
            optimizer.zero_grad()
        return [part.item() for part in parts]


def train_head(
    trainer: HeadTrainer, batches: Callable[[int], Tensor], save_every: int = 50
) -> Iterator[tuple[int, list[float], float]]:
    """Train in place; yields (steps done, losses, seconds so far) after every step."""
    done, seconds = trainer.restore()
    began = time.monotonic() - seconds
    for step in range(done, trainer.recipe.steps):
        parts = trainer.step(batches(step), step)
        seconds = time.monotonic() - began
        if (step + 1) % save_every == 0 or step + 1 == trainer.recipe.steps:
            trainer.save(step + 1, seconds)
        yield step + 1, parts, seconds
