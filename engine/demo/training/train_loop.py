"""The training loop: both models in one pass, with a checkpoint to resume from."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.demo.training.corpus import Packer, Tokens
from engine.demo.training.networks import MAX_LEN, Llama, Recipe, learning_rate, make_optimizers

# MERGED engine.demo.progress
# What a training has come to, on disk: replaced at once, and taken up again.

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


def joint_loss(target: Llama, draft: Llama, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The target's cross-entropy with the text, and the draft's with the target."""
    target_logits = target(x).flatten(0, 1).float()
    target_loss = F.cross_entropy(target_logits, y.flatten())
    teacher = target_logits.detach().softmax(-1)
    student = F.log_softmax(draft(x).flatten(0, 1).float(), -1)
    return target_loss, -(teacher * student).sum(-1).mean()


class Batches:
    """The batch of each training step: short windows first, windows of ``MAX_LEN`` at the end."""

    def __init__(self, docs: list[Tokens], long_docs: list[Tokens], recipe: Recipe) -> None:
        tokens, seed = recipe.batch_tokens, recipe.seed
        self.short = Packer(docs, recipe.window, tokens // recipe.window, seed)
        self.long = Packer(long_docs, MAX_LEN, max(1, tokens // MAX_LEN), seed + 1)
        self.short_steps = recipe.steps - recipe.long_steps

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        into_long = step - self.short_steps
        return self.short(step) if into_long < 0 else self.long(into_long)


class Trainer:
    """Both models in training, with their optimizers."""

    def __init__(self, target: Llama, draft: Llama, recipe: Recipe, checkpoint: Path) -> None:
        self.target, self.draft, self.recipe = target, draft, recipe
        self.optimizers = [o for m in (target, draft) for o in make_optimizers(m, recipe)]
        self.parts: list[Part] = [target, draft, *self.optimizers]
        self.checkpoint = checkpoint
        self.loss = joint_loss

    def restore(self) -> tuple[int, float]:
        """Take up the checkpoint, if there is one: (steps done, seconds spent on them)."""
        done, seconds = restore(self.checkpoint, asdict(self.recipe), self.parts)
        if done:
            print(f"resumed at step {done}", flush=True)
        return done, seconds

    def save(self, done: int, seconds: float) -> None:
        """Replace the checkpoint, at once."""
        save(self.checkpoint, asdict(self.recipe), self.parts, done, seconds)

    def step(self, x: Tensor, y: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """One update of both models; their losses before it."""
        with torch.autocast("cpu", torch.bfloat16):
            target_loss, draft_loss = self.loss(self.target, self.draft, x, y)
        torch.autograd.backward(target_loss + draft_loss)
        for model in (self.target, self.draft):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        return target_loss, draft_loss


def train(
    trainer: Trainer, batches: Batches, *, compiled: bool, save_every: int
) -> Iterator[tuple[int, float]]:
    """Train both models in place; yields (steps done, seconds so far) after every step."""
    recipe = trainer.recipe
    done, seconds = trainer.restore()
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
            trainer.save(step + 1, seconds)
        yield step + 1, seconds
    if done >= recipe.steps:
        yield done, seconds
