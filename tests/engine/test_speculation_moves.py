"""A text that is begun here and goes on there, with drafts or without; and what is drawn follows
the model's distribution."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.model.decoder import DecoderModel
from engine.scheduling import step_policy as decode_policy
from engine.scheduling import step_policy as prefill_policy
from engine.speculation.control.draft_lengths import FixedDraftLength
from engine.speculation.proposers.draft_model import load_draft
from protocol.requests import Request
from tests.engine.conftest import request
from tests.engine.proposers import Oracle, RandomDraft
from tests.engine.sampling_oracle import p_value
from tests.engine.speculating import CheckedEngine, MakeProposer, RandomLengths, SpeculatingRunner
from tests.engine.test_identity import hand_over
from tests.gpu.reference import logits_of

VOCAB = 320
SOME = 4  # tokens that may be drawn
LENGTH = 4
DRAWS = 2000


@pytest.fixture(scope="module")
def lives(tiny: DecoderModel) -> SpeculatingRunner:
    return SpeculatingRunner(tiny, None, count=20)


def oracle(lives: SpeculatingRunner) -> MakeProposer:
    return lambda engine: Oracle(lives.text, VOCAB, 5, 0.8, 2)


def draft(lives: SpeculatingRunner, folder: Path) -> MakeProposer:
    """The model itself, with KV of its own."""
    return lambda engine: load_draft(
        folder, engine.model, engine.state, pages=engine.config.pages, most=5
    )


@pytest.fixture(params=["oracle", "draft"])
def make(
    lives: SpeculatingRunner, tiny_folder: Path, request: pytest.FixtureRequest
) -> MakeProposer:
    return oracle(lives) if request.param == "oracle" else draft(lives, tiny_folder)


def engines(lives: SpeculatingRunner, make: MakeProposer, with_drafts: str) -> list[CheckedEngine]:
    """Two of them; who has drafts: the one before, after, or both."""
    found: list[CheckedEngine] = []
    for which in ("before", "after"):
        lives.proposer = make if with_drafts in (which, "both") else None
        lives.lengths = lambda: RandomLengths(5)
        found.append(lives.engine())
    return found


def accepted(engine: CheckedEngine) -> int:
    assert engine.speculator is not None and not engine.speculator.dropped
    return engine.scheduler.counters.speculation.accepted_tokens


@pytest.mark.parametrize("with_drafts", ["after", "both"])
def test_speculation_after_a_transfer_gives_the_same_text(
    lives: SpeculatingRunner, make: MakeProposer, with_drafts: str
) -> None:
    p, d = engines(lives, make, with_drafts)
    for wanted, whole in list(zip(lives.requests, lives.alone, strict=True))[:5]:
        for _ in "12":  # then only what is missing travels
            assert hand_over(p, d, wanted, 1 << 20) == whole
    assert p.manager.available == d.manager.available == 64
    assert accepted(d)


@pytest.mark.parametrize("with_drafts", ["before", "after", "both"])
def test_speculation_after_a_move_during_decode_gives_the_same_text(
    lives: SpeculatingRunner, make: MakeProposer, with_drafts: str
) -> None:
    """As when a worker is drained: the other one computes what the first had said."""
    before, after = engines(lives, make, with_drafts)
    for wanted, whole in list(zip(lives.requests, lives.alone, strict=True))[12:20]:
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
    assert all(accepted(engine) for engine in (before, after) if engine.speculator is not None)


def test_proposer_pauses_while_its_worker_is_lent(
    lives: SpeculatingRunner, make: MakeProposer
) -> None:
    """The text is the same, and afterwards drafts come true again."""
    lives.with_(make, lambda: FixedDraftLength(4))
    engine = lives.engine()
    for handle in range(8):
        engine.generate(handle, lives.requests[handle])
    counts, steps = engine.scheduler.counters.speculation, 0
    while step := engine.plan():
        drafts, before = steps % 6 < 3, counts.draft_tokens
        engine.run(step)
        assert drafts or counts.draft_tokens == before
        steps += 1
        engine.take_role(
            decode_policy.plan_decode_step if steps % 6 < 3 else prefill_policy.plan_prefill_step,
            drafts=steps % 6 < 3,
        )
    said = [[token.token for token in engine.said[handle]] for handle in range(8)]
    assert said == lives.alone[:8] and steps > 12
    assert accepted(engine)


def some(seed: int) -> Request:
    """LENGTH tokens, each one of the first SOME."""
    bias = tuple((token, 40.0) for token in range(SOME))
    return request(
        str(seed), [50, 60], temperature=1.0, max_tokens=LENGTH, logit_bias=bias, seed=seed
    )


def drawn(lives: SpeculatingRunner) -> dict[tuple[int, ...], int]:
    """How often each text is drawn with drafts that are as random as the text."""
    lives.with_(lambda engine: RandomDraft(SOME, 3, width=2), lambda: RandomLengths(3))
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


def chances(model: DecoderModel, texts: list[tuple[int, ...]], temperature: float) -> list[float]:
    """Of each text, by the model's own softmax."""
    found = []
    for text in texts:
        logits = logits_of(model, [50, 60], list(text), "exact")[:, :SOME].double() / temperature
        rows = logits.log_softmax(-1).gather(1, torch.tensor(text)[:, None])
        found.append(float(rows.sum().exp()))
    return found


def test_texts_follow_the_models_distribution(lives: SpeculatingRunner, tiny: DecoderModel) -> None:
    counts = drawn(lives)
    texts = list(itertools.product(range(SOME), repeat=LENGTH))
    assert set(counts) <= set(texts)
    seen = np.array([counts.get(text, 0) for text in texts], dtype=np.float64)
    assert seen.sum() == DRAWS
    assert p_value(seen, np.array(chances(tiny, texts, 1.0))) > 1e-3
    assert p_value(seen, np.array(chances(tiny, texts, 0.9))) < 1e-4, "it would be noticed"
