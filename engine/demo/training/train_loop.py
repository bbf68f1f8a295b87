"""Training loop of target and draft, and the checkpoints that both training scripts resume from."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.demo.training.corpus import Tokens, WindowPacker
from engine.demo.training.networks import (
    MAX_LEN,
    Llama,
    PairRecipe,
    learning_rate,
    make_optimizers,
)

TrainingPart: TypeAlias = nn.Module | torch.optim.Optimizer


@dataclass(frozen=True)
class TrainingCheckpoint:
    """File with the state of one training run. It contains tensors and plain values only."""

    path: Path
    recipe: object
    parts: Sequence[TrainingPart]

    def restore(self) -> tuple[int, float]:
        """Load the file if it exists. Return the completed steps and the seconds spent on them.

        Raises SystemExit if the file was made with another recipe.
        """
        if not self.path.exists():
            return 0, 0.0
        state = torch.load(self.path, weights_only=True)
        if state["recipe"] != self.recipe:
            raise SystemExit(f"{self.path} was made with another recipe; remove it to restart")
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        return int(state["step"]), float(state["seconds"])

    def save(self, done: int, seconds: float) -> None:
        """Replace the file atomically."""
        parts = [part.state_dict() for part in self.parts]
        state = {"recipe": self.recipe, "step": done, "seconds": seconds, "parts": parts}
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.path)


def update_weights(
    loss: Tensor,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    lr: float,
) -> None:
    """Backpropagate the scalar ``loss`` [], clip each model's gradients, and take one step."""
    torch.autograd.backward(loss)
    for model in models:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()


def joint_loss(target: Llama, draft: Llama, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's cross-entropy with the text, and the draft's with the target, both [].

    x and the next tokens y are [batch, length].
    """
    target_logits = target(x).flatten(0, 1).float()
    target_loss = F.cross_entropy(target_logits, y.flatten())
    teacher = target_logits.detach().softmax(-1)
    student = F.log_softmax(draft(x).flatten(0, 1).float(), -1)
    return target_loss, -(teacher * student).sum(-1).mean()


class PairBatches:
    """Batch of each training step: short windows first, windows of ``MAX_LEN`` at the end."""

    def __init__(self, docs: list[Tokens], long_docs: list[Tokens], recipe: PairRecipe) -> None:
        tokens, seed = recipe.batch_tokens, recipe.seed
        self.short = WindowPacker(docs, recipe.window, tokens // recipe.window, seed)
        self.long = WindowPacker(long_docs, MAX_LEN, max(1, tokens // MAX_LEN), seed + 1)
        self.short_steps = recipe.steps - recipe.long_steps

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return tokens and next tokens of a step, both [batch, length]."""
        long_step = step - self.short_steps
        return self.short(step) if long_step < 0 else self.long(long_step)


class PairTrainer:
    """Target and draft in training, with their optimizers and their checkpoint."""

    def __init__(self, target: Llama, draft: Llama, recipe: PairRecipe, path: Path) -> None:
        self.target, self.draft, self.recipe = target, draft, recipe
        self.optimizers = [
            *make_optimizers(target, recipe.lr, recipe.weight_decay),
            *make_optimizers(draft, recipe.lr, recipe.weight_decay),
        ]
        parts: list[TrainingPart] = [target, draft, *self.optimizers]
        self.checkpoint = TrainingCheckpoint(path, asdict(recipe), parts)
        self.loss = joint_loss

    def step(self, x: Tensor, y: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Update both models on x, y [batch, length]; return their losses [] before the update."""
        with torch.autocast("cpu", torch.bfloat16):
            target_loss, draft_loss = self.loss(self.target, self.draft, x, y)
        update_weights(target_loss + draft_loss, (self.target, self.draft), self.optimizers, lr)
        return target_loss, draft_loss


def train(
    trainer: PairTrainer, batches: PairBatches, *, compiled: bool, save_every: int
) -> Iterator[tuple[int, float]]:
    """Train both models in place; yield (steps done, seconds so far) after every step."""
    recipe = trainer.recipe
    done, seconds = trainer.checkpoint.restore()
    if done:
        print(f"resumed at step {done}", flush=True)
    if compiled:
        trainer.loss = torch.compile(joint_loss, dynamic=False)
    clock = time.monotonic() - seconds
    for step in range(done, recipe.steps):
        x, y = batches(step)
        lr = learning_rate(step, recipe)
        target_loss, draft_loss = trainer.step(x, y, lr)
        seconds = time.monotonic() - clock
        if step < 10 or (step + 1) % 20 == 0:
            print(
                f"step {step + 1}/{recipe.steps} window {x.shape[1]} "
                f"target {target_loss.item():.3f} draft-on-target {draft_loss.item():.3f} "
                f"lr {lr:.2e} {seconds:.0f}s",
                flush=True,
            )
        if (step + 1) % save_every == 0 or step + 1 == recipe.steps:
            trainer.checkpoint.save(step + 1, seconds)
        yield step + 1, seconds
    if done >= recipe.steps:
        yield done, seconds
