"""A text that is begun here and goes on there, with drafts or without; and what is drawn follows
the model's distribution."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from engine.core import Engine
from engine.model import Model
from protocol.request import Request
from tests.engine.conftest import request
from tests.engine.proposers import Oracle, RandomDraft
from tests.engine.sampling import p_value
from tests.engine.speculating import AnyLengths, Speculating
from tests.engine.test_identity import hand_over
from tests.gpu.reference import logits_of

VOCAB = 320
SOME = 4  # tokens that may be drawn
LENGTH = 4
DRAWS = 3000


@pytest.fixture(scope="module")
def lives(tiny: Model) -> Speculating:
    return Speculating(tiny, None)


def engines(lives: Speculating, with_drafts: str) -> list[Engine]:
    """Two of them, named by who has drafts: the one before, after, both."""
    found: list[Engine] = []
    for which in ("before", "after"):
        lives.proposer = None
        if with_drafts in (which, "both"):
            lives.with_(lambda engine: Oracle(lives.text, VOCAB, 5, 0.8, 2), lambda: AnyLengths(5))
        found.append(lives.engine())
    return found


@pytest.mark.parametrize("with_drafts", ["before", "after", "both"])
def test_handed_over_after_the_prompt(lives: Speculating, with_drafts: str) -> None:
    p, d = engines(lives, with_drafts)
    for wanted, whole in list(zip(lives.requests, lives.alone, strict=True))[:6]:
        for _ in "12":  # then only what is missing travels
            assert hand_over(p, d, wanted, 1 << 20) == whole
    assert p.manager.available == d.manager.available == 64


@pytest.mark.parametrize("with_drafts", ["before", "after", "both"])
def test_moved_in_the_middle_of_the_text(lives: Speculating, with_drafts: str) -> None:
    """As when a worker is drained: the other one computes what the first had said."""
    for wanted, whole in list(zip(lives.requests, lives.alone, strict=True))[12:20]:
        before, after = engines(lives, with_drafts)
        before.generate(0, wanted)
        said: list[int] = []
        while len(said) < len(whole) // 2:
            said += [token.token for token in before.run(before.plan())]
        before.drop(0)
        assert before.manager.available == 64
        if len(said) < len(whole):
            after.generate(0, wanted.resumed(said))
            while step := after.plan():
                said += [token.token for token in after.run(step)]
        assert said == whole


def some(seed: int) -> Request:
    """LENGTH tokens, each one of the first SOME."""
    bias = tuple((token, 40.0) for token in range(SOME))
    return request(
        str(seed), [50, 60], temperature=1.0, max_tokens=LENGTH, logit_bias=bias, seed=seed
    )


def drawn(lives: Speculating) -> dict[tuple[int, ...], int]:
    """How often each text is drawn with drafts that are as random as the text."""
    lives.with_(lambda engine: RandomDraft(SOME, 3, width=2), lambda: AnyLengths(3))
    engine = lives.engine(max_batch=32, pages=64)
    for seed in range(DRAWS):
        engine.generate(seed, some(seed))
    while step := engine.plan():
        engine.run(step)
    assert engine.scheduler.counters.speculation.accepted_tokens > DRAWS / 20
    counts: dict[tuple[int, ...], int] = {}
    for said in engine.said.values():
        text = tuple(token.token for token in said)
        counts[text] = counts.get(text, 0) + 1
    return counts


def chances(model: Model, texts: list[tuple[int, ...]], temperature: float) -> list[float]:
    """Of each text, by the model's own softmax."""
    found = []
    for text in texts:
        logits = logits_of(model, [50, 60], list(text), "exact")[:, :SOME].double() / temperature
        rows = logits.log_softmax(-1).gather(1, torch.tensor(text)[:, None])
        found.append(float(rows.sum().exp()))
    return found


def test_texts_follow_the_models_distribution(lives: Speculating, tiny: Model) -> None:
    counts = drawn(lives)
    texts = list(itertools.product(range(SOME), repeat=LENGTH))
    assert set(counts) <= set(texts)
    seen = np.array([counts.get(text, 0) for text in texts], dtype=np.float64)
    assert seen.sum() == DRAWS
    assert p_value(seen, np.array(chances(tiny, texts, 1.0))) > 1e-3
    assert p_value(seen, np.array(chances(tiny, texts, 0.9))) < 1e-4, "it would be noticed"
