"""A draft model proposes what it would say itself, whatever happens to a sequence meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.lib.engines import engine_config
from engine.batching.attention_metadata import AttentionMetadata, PackedBatch, chunk_attention
from engine.execution.engine import Engine
from engine.kv_cache.kv_pool import make_pool
from engine.model.decoder import DecoderModel
from engine.model.linear import make_draft_linear
from engine.sampling.filters import NoiseRows, noise_key, sample_unfiltered
from engine.scheduling.draft_pages import allocate_draft_pages, trim_draft_pages
from engine.scheduling.sequence import Sequence as Running
from engine.scheduling.step_policy import plan_decode_step
from engine.speculation.proposers.draft_model import (
    CATCH_UP_WORTH,
    MAX_INLINE_TOKENS,
    DraftModel,
    load_draft,
)
from engine.speculation.proposers.draft_sampler import TOP_TOKENS
from protocol.errors import StartupError
from tests.engine.conftest import load_model, request
from tests.engine.families import save

SIZES: dict[str, Any] = {"pages": 64, "max_batch": 8, "chunk": 64, "max_model_len": 1024}
ROUNDING = 1e-4
"""Of a logit, in fp32. Another batch is another order of additions."""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_model(save(tmp_path_factory.mktemp("window"), "mistral"))


class Desk:
    """An engine whose decoding sequences are proposed to."""

    def __init__(self, target: DecoderModel, draft: DecoderModel, **changes: Any) -> None:
        sizes = {**SIZES, **{k: v for k, v in changes.items() if k in SIZES}}
        own = {k: v for k, v in changes.items() if k not in SIZES}
        self.engine = Engine(target, engine_config(**sizes), plan_decode_step)
        self.proposer = DraftModel(
            draft,
            self.engine.state,
            **{"pages": sizes["pages"], "positions": 1024, "most": 8, **own},
        )
        self.draft = draft
        format_ = draft.config.kv_format("exact", "wide", draft.dtype.itemsize)
        self._pool = make_pool(format_, 8, draft.dtype, draft.device)

    def propose(self, wanted: Callable[[Running], int]) -> list[tuple[Running, list[int]]]:
        """Plan a step, propose, check what is proposed, and run the step without drafts."""
        engine = self.engine
        planned = engine.plan()
        decoding = planned.decode
        asked = allocate_draft_pages(engine.manager, decoding, [wanted(s) for s in decoding])
        out: list[tuple[Running, list[int]]] = []
        if any(asked):
            rows = torch.tensor([s.row for s in decoding])
            drafts = self.proposer.propose(decoding, rows, asked)
            assert all(n <= most for n, most in zip(drafts.counts, asked, strict=True))
            parts = drafts.tokens.split(list(drafts.counts))
            out = [(s, part.tolist()) for s, part in zip(decoding, parts, strict=True)]
            for sequence, tokens in out:
                self._check(sequence, tokens)
        if planned:
            engine.run(planned)
        for sequence in decoding:
            if sequence.pages:
                trim_draft_pages(engine.manager, sequence)
        return out

    @torch.inference_mode()
    def _check(self, sequence: Running, tokens: list[int]) -> None:
        """They are what the draft model says after the text, and after each of ``tokens`` but the
        last. Between two that are as likely but for rounding it may choose either."""
        if not tokens:
            return
        text, first = torch.tensor(sequence.tokens + tokens[:-1]), len(sequence.tokens)
        at, like = torch.arange(len(text)), torch.empty(0)
        views = {
            window: AttentionMetadata(
                0, (), (chunk_attention(at[:0], 0, 0, len(text), window, like),)
            )
            for window in set(self.draft.config.windows)
        }
        logits = self.draft.forward(PackedBatch(text, at, at, views, at[first - 1 :]), self._pool)
        s = sequence.request.sampling
        if s.temperature == 0.0:
            chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert bool((chosen >= logits.amax(dim=-1) - ROUNDING).all())
            return
        keys = torch.full((len(tokens),), noise_key(s.seed, s.choice))
        rows = NoiseRows(torch.full((len(tokens),), s.temperature), keys, at[first - 1 :] + 1)
        assert tokens == sample_unfiltered(logits, rows).tolist()


def _prompt(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 320) for _ in range(count)]


def _decode_all(engine: Engine) -> None:
    while engine.scheduler.queue or engine.scheduler.prefilling:
        engine.run(engine.plan())


@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_drafts_are_the_draft_models_own_tokens(
    tiny: DecoderModel, window: DecoderModel, temperature: float
) -> None:
    for draft in (tiny, window):
        desk = Desk(window, draft)
        for i, count in enumerate([5, 31, 64, 150]):
            wanted = request(
                f"r{i}", _prompt(count, i), max_tokens=40, temperature=temperature, seed=i
            )
            desk.engine.generate(i, wanted)
        _decode_all(desk.engine)
        proposed = 0
        for step in range(40):
            told = desk.propose(lambda s, step=step: (s.handle + step) % 7)  # type: ignore[misc]
            proposed += sum(len(tokens) for _, tokens in told)
        assert proposed > 150


def test_identical_draft_model_is_always_accepted(tiny: DecoderModel) -> None:
    """Noise included: what is proposed is what the target draws."""
    desk = Desk(tiny, tiny)
    told: list[tuple[int, list[int]]] = []
    for i, temperature in enumerate([0.0, 0.3]):
        wanted = request(f"r{i}", _prompt(40, i), max_tokens=30, temperature=temperature, seed=5)
        desk.engine.generate(i, wanted)
    _decode_all(desk.engine)
    sequences = list(desk.engine.scheduler.decoding)
    while desk.engine.scheduler.decoding:
        for sequence, tokens in desk.propose(lambda s: 4):
            told.append((len(sequence.tokens), tokens))
            assert len(tokens) == 4 or len(sequence.tokens) + 5 > sequence.request.length_limit
    assert len(sequences) == 2
    assert len(told) > 50


@settings(max_examples=settings.default.max_examples // 8)
@given(data=st.data())
def test_drafts_match_reference_under_preemption_and_shared_prefixes(
    tiny: DecoderModel, window: DecoderModel, data: st.DataObject
) -> None:
    """Few pages: sequences are preempted, share prefixes, end, and are not always asked."""
    desk = Desk(tiny, window, pages=data.draw(st.integers(12, 30)), max_batch=4, chunk=64)
    system = _prompt(70)
    for i in range(data.draw(st.integers(1, 7))):
        own = _prompt(data.draw(st.integers(1, 60)), 10 + i)
        prompt = system + own if data.draw(st.booleans()) else own
        desk.engine.generate(i, request(f"r{i}", prompt, max_tokens=data.draw(st.integers(2, 40))))
    for _ in range(150):
        if not desk.engine.scheduler.sequences:
            break
        salt = data.draw(st.integers(0, 9))
        desk.propose(lambda s, salt=salt: (s.handle * 3 + salt) % 5)  # type: ignore[misc]
    assert not desk.engine.scheduler.sequences


def test_catch_up_is_limited_per_step(tiny: DecoderModel) -> None:
    desk = Desk(tiny, tiny, chunk=32)
    desk.proposer._chunk = 50
    for i in range(2):
        desk.engine.generate(i, request(f"r{i}", _prompt(120, i), max_tokens=40))
    _decode_all(desk.engine)
    counts = [[len(t) for _, t in desk.propose(lambda s: 3)] for _ in range(6)]
    # 50 tokens a step: the first of 120 at once, then the second; neither waits for both
    assert counts == [[0, 0], [0, 0], [3, 0], [3, 0], [3, 3], [3, 3]]


def test_a_shared_prefix_is_computed_once(tiny: DecoderModel) -> None:
    desk = Desk(tiny, tiny)
    system = _prompt(96)
    desk.engine.generate(0, request("first", [*system, 5, 6], max_tokens=60))
    _decode_all(desk.engine)
    while not any(tokens for _, tokens in desk.propose(lambda s: 2)):
        pass
    desk.engine.generate(1, request("second", [*system, 9, 8], max_tokens=60))
    _decode_all(desk.engine)
    second = desk.engine.scheduler.sequences[1]
    assert desk.proposer._index.tokens(second) == 96
    assert [len(tokens) for _, tokens in desk.propose(lambda s: 2)] == [2, 2]


def test_no_drafts_beyond_the_draft_context(tiny: DecoderModel) -> None:
    desk = Desk(tiny, tiny, positions=60)
    desk.engine.generate(0, request("r", _prompt(50), max_tokens=20))
    _decode_all(desk.engine)
    counts = {}
    while desk.engine.scheduler.decoding:
        length = len(desk.engine.scheduler.decoding[0].tokens)
        told = desk.propose(lambda s: 4)
        counts[length] = len(told[0][1]) if told else 0
    assert [counts[n] for n in (55, 57, 58, 60, 61, 66)] == [4, 4, 3, 1, 0, 0]


def test_no_catch_up_for_few_remaining_tokens(tiny: DecoderModel) -> None:
    desk = Desk(tiny, tiny, chunk=512)
    desk.engine.generate(
        0, request("r", _prompt(20 + MAX_INLINE_TOKENS + 3 * CATCH_UP_WORTH), max_tokens=5)
    )
    _decode_all(desk.engine)
    while desk.engine.scheduler.decoding:
        told = desk.propose(lambda s: 2)
        assert all(tokens == [] for _, tokens in told)


def test_ended_row_lease_is_forgotten(tiny: DecoderModel) -> None:
    desk = Desk(tiny, tiny)
    desk.engine.generate(0, request("r", _prompt(20), max_tokens=20))
    _decode_all(desk.engine)
    desk.propose(lambda s: 2)
    desk.proposer.forget([s.row_lease for s in desk.engine.scheduler.decoding])
    assert not desk.proposer._index._states
    desk.propose(lambda s: 2)  # and starts anew


def _pad(folder: Path, vocab: int) -> Path:
    return save(folder, "llama", vocab_size=vocab)


def test_another_vocabulary_is_refused(tiny: DecoderModel, tmp_path: Path) -> None:
    state = Engine(tiny, engine_config(**SIZES), plan_decode_step).state
    with pytest.raises(StartupError, match=r"other: has a vocabulary of 352 .* of 320"):
        load_draft(_pad(tmp_path / "other", 352), tiny, state, pages=64, most=4)


TOKENIZER = '{{"model": {{"vocab": {{"a": 0, "{b}": 1}}}}, "added_tokens": []}}'


@pytest.mark.parametrize("size", [256, 352])
def test_differently_padded_vocabulary_is_accepted(
    tiny: DecoderModel, tmp_path: Path, size: int
) -> None:
    draft = _pad(tmp_path / "draft", size)
    target = tmp_path / "target"
    target.mkdir()
    for folder in (draft, target):
        (folder / "tokenizer.json").write_text(TOKENIZER.format(b="b"))
    engine = Engine(tiny, engine_config(**SIZES), plan_decode_step)
    options: dict[str, Any] = {"pages": 64, "most": 4, "target_folder": target}
    proposer = load_draft(draft, tiny, engine.state, **options)
    engine.generate(0, request("r", [319, 255, 7], max_tokens=9))
    _decode_all(engine)
    decoding: Sequence[Running] = engine.scheduler.decoding
    rows = torch.tensor([s.row for s in decoding])
    assert proposer.propose(decoding, rows, [3]).counts == [3]

    (draft / "tokenizer.json").write_text(TOKENIZER.format(b="c"))
    with pytest.raises(StartupError, match=r"its tokenizer is not that of .*target: token 1 "):
        load_draft(draft, tiny, engine.state, **options)
    (draft / "tokenizer.json").write_text("[1]")
    with pytest.raises(StartupError, match="not a usable tokenizer"):
        load_draft(draft, tiny, engine.state, **options)


def test_top_tokens_are_fewer_than_the_vocabulary(tiny: DecoderModel) -> None:
    """Else the tests above would not see what is left out of it."""
    assert tiny.config.vocab_size > TOP_TOKENS


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 40])
def test_draft_linear_matches_matmul(rows: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, bias, x, residual = (
        torch.randn(shape, generator=generator)
        for shape in ((256, 96), (256,), (rows, 96), (rows, 256))
    )
    for own in (None, bias):
        product = make_draft_linear(weight, own)
        expected = torch.nn.functional.linear(x, weight, own)
        torch.testing.assert_close(product(x), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            product.add(x, residual), expected + residual, atol=1e-4, rtol=1e-4
        )
