"""Training of Medusa and EAGLE heads: recipes, losses, optimizers and the training loop.

The heads learn to predict what the target predicts further on. ``train_heads`` calls this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.demo.training.corpus import Tokens, WindowPacker
from engine.demo.training.heads_networks import (
    TrainableEagleHead,
    TrainableMedusaHeads,
    UnrolledAttention,
    eagle_step,
)
from engine.demo.training.networks import Llama, make_optimizers
from engine.demo.training.train_loop import TrainingCheckpoint, TrainingPart, update_weights

HeadKind: TypeAlias = Literal["medusa", "eagle"]

MEDUSA_HEADS = 3
MEDUSA_BLOCKS = 1
WEIGHT_DECAY = 0.05
# Weight of EAGLE's feature loss relative to its prediction loss (EAGLE, section 4.2).
FEATURE_WEIGHT = 0.5
# Rows of logits that the distillation loss computes at a time, so that they fit into the CPU cache.
LOSS_CHUNK_ROWS = 128


@dataclass(frozen=True)
class HeadRecipe:
    """Hyperparameters of a head. With the text and the target they fix its weights."""

    kind: HeadKind
    steps: int
    batch_tokens: int = 4096
    window: int = 512
    warmup: int = 20
    lr: float = 2e-3
    decay: float = 0.6  # share of the steps, at the end, in which the rate falls to zero
    own_share: int = 3  # every own_share-th batch is text that the target generated
    own_prompts: int = 2048  # number of generated texts
    own_tokens: int = 192  # generated tokens of each
    segments: tuple[int, ...] = (128, 512)  # attention lengths of an EAGLE head, in rotation
    unrolled: int = 2  # steps of an EAGLE head, each on the features of the previous step
    seed: int = 1


RECIPES = {"medusa": HeadRecipe("medusa", 320), "eagle": HeadRecipe("eagle", 500, lr=4e-3)}


class _DistillationLoss(torch.autograd.Function):
    """Chunked cross-entropy of student and teacher logits, with gradients computed in forward.

    The full [rows, vocab] logits of neither model ever exist at once.
    """

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor
    ) -> Tensor:
        """Return the mean over rows, []. Features: [rows, hidden], heads: [vocab, hidden]."""
        total, gradients = student.new_zeros((), dtype=torch.float32), []
        learns = ctx.needs_input_grad[1]
        gradient = torch.zeros_like(student_head, dtype=torch.float32) if learns else None
        chunks = zip(student.split(LOSS_CHUNK_ROWS), teacher.split(LOSS_CHUNK_ROWS), strict=True)
        for rows, teacher_rows in chunks:
            p = F.linear(teacher_rows, teacher_head).float().softmax(-1)
            logits = F.linear(rows, student_head).float()
            normalizer = logits.logsumexp(-1, keepdim=True)
            total += (normalizer - (p * logits).sum(-1, keepdim=True)).sum()
            error = logits.sub_(normalizer).exp_().sub_(p).to(student.dtype)
            gradients.append(error @ student_head)
            if gradient is not None:
                gradient += error.t() @ rows
        ctx.save_for_backward(torch.cat(gradients).div_(len(student)))
        ctx.gradient = None if gradient is None else gradient.div_(len(student))
        return total / len(student)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients of student [rows, hidden] and student head [vocab, hidden]."""
        head_gradient = None if ctx.gradient is None else ctx.gradient * outer
        return ctx.saved_tensors[0] * outer, head_gradient, None, None


def distillation_loss(
    student: Tensor, teacher: Tensor, target: Llama, student_head: Tensor | None = None
) -> Tensor:
    """Return the cross-entropy [] of the student's predictions with the target's.

    Both features are [..., hidden]. ``teacher`` is read by the target's LM head, ``student`` by
    ``student_head`` [vocab, hidden], or by the target's too if None. Matrix products run in
    bfloat16.
    """
    weight = target.model.embed_tokens.weight.bfloat16()
    with torch.autocast("cpu", enabled=False):
        rows, teacher_rows = student.flatten(0, -2).bfloat16(), teacher.flatten(0, -2).bfloat16()
        head = weight if student_head is None else student_head.bfloat16()
        loss: Tensor = _DistillationLoss.apply(rows, head, teacher_rows, weight)  # type: ignore[no-untyped-call]
    return loss


def medusa_losses(heads: TrainableMedusaHeads, target: Llama, ids: Tensor) -> list[Tensor]:
    """Return a loss [] per head on ids [batch, length].

    Head ``i`` at position t learns what the target predicts at t + 1 + i.
    """
    with torch.no_grad():
        features = target.features(ids)
    losses = []
    for i, head in enumerate(heads):
        assert isinstance(head, nn.Sequential)
        x, lm_head = head[:-1](features[:, : -1 - i]), head[-1].weight
        assert isinstance(lm_head, Tensor)
        losses.append(distillation_loss(x, features[:, 1 + i :], target, lm_head))
    return losses


def eagle_losses(
    head: TrainableEagleHead, target: Llama, ids: Tensor, segment: int, steps: int
) -> list[Tensor]:
    """Return a loss [] per unrolled step on ids [batch, n * segment + 1].

    The head attends within segments only, because in serving it may not know the earlier text.
    """
    with torch.no_grad():
        features = target.features(ids)
        tokens = ids[:, 1:].unflatten(1, (-1, segment)).flatten(0, 1)
        embedded = target.model.embed_tokens(tokens)
    before = features[:, :-1].unflatten(1, (-1, segment)).flatten(0, 1)
    after = features[:, 1:].unflatten(1, (-1, segment)).flatten(0, 1)
    cos, sin = target.cos[:segment], target.sin[:segment]
    losses, attention, known = [], UnrolledAttention(), before
    for step in range(steps):
        out = eagle_step(head, attention, head.join(embedded, known), cos, sin)
        loss = distillation_loss(out[:, step:], after[:, step:], target)
        feature_loss = F.smooth_l1_loss(out[:, step:].float(), after[:, step:].float())
        losses.append(loss + FEATURE_WEIGHT * feature_loss)
        known = torch.cat((before[:, :1], out[:, :-1]), 1)
    return losses


def head_losses(
    head: nn.Module, target: Llama, ids: Tensor, recipe: HeadRecipe, step: int
) -> list[Tensor]:
    """Return a loss [] per Medusa head or per unrolled EAGLE step; ids: [batch, window + 1]."""
    if isinstance(head, TrainableMedusaHeads):
        return medusa_losses(head, target, ids)
    assert isinstance(head, TrainableEagleHead)
    segment = recipe.segments[step % len(recipe.segments)]
    return eagle_losses(head, target, ids, min(segment, recipe.window), recipe.unrolled)


def head_learning_rate(step: int, recipe: HeadRecipe) -> float:
    """Return the rate of a step: warm up, hold, fall linearly to zero."""
    left = (recipe.steps - step) / (recipe.steps * recipe.decay)
    return recipe.lr * min(1.0, (step + 1) / recipe.warmup, left)


def make_head(recipe: HeadRecipe, target: Llama) -> nn.Module:
    """Create an untrained head for the target."""
    if recipe.kind == "medusa":
        return TrainableMedusaHeads(MEDUSA_HEADS, MEDUSA_BLOCKS, target)
    return TrainableEagleHead(target.shape, recipe.seed)


class HeadBatches:
    """Batch of each training step: the corpus, and every ``own_share``-th the target's texts."""

    def __init__(self, docs: list[Tokens], own: list[Tokens], recipe: HeadRecipe) -> None:
        rows = max(1, recipe.batch_tokens // recipe.window)
        self._packers = [
            WindowPacker(docs, recipe.window, rows, recipe.seed),
            WindowPacker(own, recipe.window, rows, recipe.seed + 1),
        ]
        self._share = recipe.own_share

    def __call__(self, step: int) -> Tensor:
        """Return token ids [rows, window + 1]."""
        turn, at = divmod(step, self._share)
        own = at == self._share - 1
        x, y = self._packers[own](turn if own else turn * (self._share - 1) + at)
        return torch.cat((x, y[:, -1:]), 1)


class HeadTrainer:
    """One head in training, with its optimizers and its checkpoint; the target is frozen."""

    def __init__(self, target: Llama, recipe: HeadRecipe, path: Path) -> None:
        self.target, self.recipe = target.requires_grad_(False), recipe
        self.head = make_head(recipe, target)
        self.optimizers = make_optimizers(self.head, recipe.lr, WEIGHT_DECAY)
        parts: list[TrainingPart] = [self.head, *self.optimizers]
        self.checkpoint = TrainingCheckpoint(path, repr(asdict(recipe)), parts)

    def step(self, ids: Tensor, step: int) -> list[float]:
        """Update the head on ids [rows, window + 1]; return the losses before the update."""
        with torch.autocast("cpu", torch.bfloat16):
            losses = head_losses(self.head, self.target, ids, self.recipe, step)
        rate = head_learning_rate(step, self.recipe)
        update_weights(torch.stack(losses).sum(), [self.head], self.optimizers, rate)
        return [loss.item() for loss in losses]


def train_head(
    trainer: HeadTrainer, batches: Callable[[int], Tensor], save_every: int = 50
) -> Iterator[tuple[int, list[float], float]]:
    """Train in place; yield (steps done, losses, seconds so far) after every step.

    ``batches`` returns the token ids [rows, window + 1] of a step.
    """
    done, seconds = trainer.checkpoint.restore()
    began = time.monotonic() - seconds
    for step in range(done, trainer.recipe.steps):
        losses = trainer.step(batches(step), step)
        seconds = time.monotonic() - began
        if (step + 1) % save_every == 0 or step + 1 == trainer.recipe.steps:
            trainer.checkpoint.save(step + 1, seconds)
        yield step + 1, losses, seconds
