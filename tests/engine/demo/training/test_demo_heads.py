"""Training of heads: losses, learning and resuming, measurement, and export for serving."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from engine.demo.training.corpus import VOCAB_SIZE, Tokens
from engine.demo.training.export import model_config, write_json
from engine.demo.training.heads_evaluate import (
    Continuations,
    draft_model_logits,
    estimate_tree_prior,
    generate_continuations,
    greedy_agreement,
    head_logits,
    measure_draft,
    sample_prompts,
    target_token_ranks,
    tokens_per_step,
)
from engine.demo.training.heads_networks import (
    TrainableEagleHead,
    UnrolledAttention,
    eagle_step,
)
from engine.demo.training.heads_recipe import (
    HeadBatches,
    HeadRecipe,
    HeadTrainer,
    distillation_loss,
    head_learning_rate,
    train_head,
)
from engine.demo.training.networks import Llama, LlamaShape
from engine.demo.training.train_heads import export_head, load_head
from engine.model.decoder import DecoderModel
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config
from engine.speculation.draft_source import detect_draft_kind
from engine.speculation.proposers.draft_tree import best_tree
from engine.speculation.proposers.eagle_heads import EagleHead as ServedEagle
from engine.speculation.proposers.medusa import MedusaHeads as ServedMedusa

SMALL = LlamaShape(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=48)
RECIPE = HeadRecipe(
    "medusa", 30, batch_tokens=128, window=32, warmup=3, segments=(16, 32), own_share=2, lr=1e-2
)


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    """Enable gradients, which any engine loaded in this process has disabled."""
    with torch.enable_grad():
        yield


@pytest.fixture(scope="module")
def target() -> Llama:
    target = Llama(SMALL, 0)
    with torch.no_grad():  # the initial weights predict all tokens alike
        for p in target.parameters():
            if p.ndim == 2:
                p *= 8.0
    return target.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def folder(target: Llama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "target"
    out.mkdir()
    save_file({k: v.clone() for k, v in target.state_dict().items()}, out / "model.safetensors")
    write_json(out / "config.json", model_config(SMALL, 0, 1))
    return out


def docs(seed: int, count: int = 6) -> list[Tokens]:
    """Texts in which the next token follows from the last one."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(50) + 3 * np.arange(400)) % 50 + 10 for _ in range(count)]


def test_distillation_loss_is_cross_entropy_with_the_targets_predictions(target: Llama) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(300, 32, requires_grad=True), torch.randn(300, 32)
    lm_head = torch.randn(VOCAB_SIZE, 32, requires_grad=True)
    loss = distillation_loss(student, teacher, target, lm_head)
    gradients = torch.autograd.grad(loss, [student, lm_head])
    expected = F.cross_entropy(student @ lm_head.t(), target.logits(teacher).softmax(-1))
    references = torch.autograd.grad(expected, [student, lm_head])
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)
    for ours, theirs in zip(gradients, references, strict=True):
        cosine = F.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)
        assert float(cosine) > 0.99 and float(ours.norm() / theirs.norm()) == pytest.approx(1, 0.02)


def test_unrolled_training_steps_equal_serving_chains(target: Llama) -> None:
    """Training step s computes at each row what a chain of s drafts computes when served."""
    head = TrainableEagleHead(SMALL, 4)
    torch.manual_seed(1)
    ids = torch.randint(VOCAB_SIZE, (1, 9))
    before = target.features(ids)[:, :-1]
    embedded = target.model.embed_tokens(ids[:, 1:])
    cos, sin = target.cos[:8], target.sin[:8]
    attention, known, steps = UnrolledAttention(), before, []
    with torch.no_grad():
        for _ in range(3):
            steps.append(eagle_step(head, attention, head.join(embedded, known), cos, sin))
            known = torch.cat((before[:, :1], steps[-1][:, :-1]), 1)
        for row in range(2, 8):
            known = before[:, : row - 1].clone()  # true features up to two rows before
            for step in range(3):
                length = row - 1 + step
                x = head.join(embedded[:, :length], known)
                out = eagle_step(head, UnrolledAttention(), x, cos[:length], sin[:length])
                torch.testing.assert_close(out[:, -1], steps[step][:, length - 1])
                known = torch.cat((known, out[:, -1:]), 1)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_learn_and_stopped_training_resumes(target: Llama, tmp_path: Path, kind: str) -> None:
    recipe = replace(RECIPE, kind=kind)
    batches = HeadBatches(docs(0), docs(1), recipe)
    once = [p for _, p, _ in train_head(HeadTrainer(target, recipe, tmp_path / "a.pt"), batches)]
    first, last = np.mean(once[:4], axis=0), np.mean(once[-4:], axis=0)
    assert (last < first - 0.1).all(), (first, last)
    stopped = train_head(HeadTrainer(target, recipe, tmp_path / "b.pt"), batches, save_every=10)
    for done, _, _ in stopped:
        if done == 20:
            break
    stopped.close()
    rest = [p for _, p, _ in train_head(HeadTrainer(target, recipe, tmp_path / "b.pt"), batches)]
    np.testing.assert_allclose(rest, once[20:], rtol=1e-5)
    with pytest.raises(SystemExit, match="another recipe"):
        HeadTrainer(target, replace(recipe, lr=1.0), tmp_path / "b.pt").checkpoint.restore()


def test_learning_rate_rises_and_falls() -> None:
    rates = [head_learning_rate(step, RECIPE) for step in range(RECIPE.steps)]
    assert rates[0] < rates[5] == RECIPE.lr > rates[-1] > 0


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_exported_head_and_served_head_compute_the_same_logits(
    target: Llama, folder: Path, tmp_path: Path, kind: str
) -> None:
    recipe = replace(RECIPE, kind=kind)
    trainer = HeadTrainer(target, recipe, tmp_path / "x.pt")
    for p in trainer.head.parameters():
        p.data += 0.05 * torch.randn_like(p)
    export_head(trainer.head, target, recipe, [[0.5]] * 8, tmp_path / kind)
    assert detect_draft_kind(tmp_path / kind) == kind
    head = load_head(target, recipe, tmp_path / kind)
    config = load_config(folder)
    weights = load_weights(folder, config, torch.float32, torch.device("cpu"))
    model = DecoderModel(config, weights, 64)
    ids = torch.randint(VOCAB_SIZE, (12,))
    with torch.no_grad():
        by_depth = head_logits(head, target)(ids, 1)
        seen = target.features(ids[None])[0]
    if kind == "medusa":
        logits = ServedMedusa(model, tmp_path / kind)(seen, 3).view(3, 12, -1)
        for depth, expected in enumerate(by_depth):
            torch.testing.assert_close(logits[depth, : len(expected)], expected, atol=1e-3, rtol=0)
    else:
        served = ServedEagle(model, tmp_path / kind, 1, 64)
        logits = model.lm_head(_served(served, ids[1:-1], seen[:-2]))
        torch.testing.assert_close(logits, by_depth[0], atol=1e-3, rtol=0)


def _served(head: ServedEagle, tokens: Tensor, before: Tensor) -> Tensor:
    from engine.speculation.proposers.eagle_layer import EagleAttention, EagleSpans

    count = len(tokens)
    spans = EagleSpans(np.array([0]), np.array([0]), np.array([count]))
    at = torch.arange(count)
    view = EagleAttention(spans, torch.tensor([[0]]), 1, 2, torch.float32).first_pass()
    return head(tokens, before, at, at, view)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_equal_to_the_target_is_always_accepted(
    target: Llama, folder: Path, temperature: float
) -> None:
    with torch.inference_mode():
        texts = generate_continuations(folder, sample_prompts(docs(2), 3, 0), [temperature], 24)
    assert [len(t) - p for t, p in zip(texts.texts, texts.prompts, strict=True)] <= [24, 24, 24]
    ranks = target_token_ranks(partial(draft_model_logits, target), texts, temperature)
    assert ranks.shape[1] > 20 and float((ranks == 0).float().mean()) > 0.99
    assert greedy_agreement(partial(draft_model_logits, target), target, docs(3), 64)[0] == 1.0
    measurement = measure_draft(ranks, [[0.9]] * 4, temperature, spine_only=True)
    assert measurement.per_step[4] == pytest.approx(5.0, abs=0.1)


def test_tree_prior_and_tokens_per_step_equal_hand_counts() -> None:
    ranks = torch.tensor([[0, 0, 1, 9], [0, 1, 0, 0], [2, 0, 0, 0]])
    spine = estimate_tree_prior(ranks, spine_only=True)
    assert spine[0][:2] == [0.5, 0.25] and spine[1][:2] == [0.5, 0.5] and spine[2][2] == 1.0
    whole = estimate_tree_prior(ranks, spine_only=False)
    assert whole[1][:2] == [0.6667, 0.3333] and whole[2][0] == 0.6667
    tree = best_tree([[0.5, 0.4], [0.4, 0.3], [0.1]], 5)  # 0, 1, 00, 01 and 10
    assert tokens_per_step(ranks, tree) == (3 + 3 + 3 + 1) / 4


def test_texts_shorter_than_all_depths_are_skipped(target: Llama) -> None:
    texts = Continuations([np.arange(40), np.arange(8)], [20, 5])
    assert target_token_ranks(partial(draft_model_logits, target), texts, 0.0).shape == (4, 16)
