"""Sampling inside the engine: text depends on the request alone, and log-probs on the model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.engine import Engine
from engine.kv_cache.kv_format import Codec, split_into_pieces
from engine.scheduling.sequence import Phase
from protocol.errors import InvalidRequest
from protocol.requests import Finish, Logprobs, Request
from tests.engine.conftest import drain, request
from tests.engine.sampling_oracle import EOS

Make = Callable[..., Engine]

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.05, "temperature": 1.7},
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"repetition_penalty": 1.3, "top_p": 0.8},
    {"temperature": 0.0, "repetition_penalty": 0.7},
    {"temperature": 0.0, "logit_bias": ((7, 5.0), (300, -100.0))},
    {"logit_bias": tuple((t, 1.0) for t in range(0, 300, 2)), "top_k": 280},
    {"min_tokens": 6, "ignore_eos": False, "logit_bias": ((EOS, 12.0),)},
    {"top_p": 0.7, "top_k": 50, "min_p": 0.01, "frequency_penalty": 0.4, "logprobs": 3},
    {"allowed_token_ids": tuple(range(3, 300, 7)), "logit_bias": ((4, 100.0), (10, 5.0))},
    {"temperature": 0.0, "allowed_token_ids": (9, 5, EOS), "min_tokens": 4, "ignore_eos": False},
    {"logprobs": 0, "logprob_token_ids": (7, 300, 2), "presence_penalty": 0.2},
]


def requests(count: int, longest: int = 40) -> list[Request]:
    draw = random.Random(count)
    out = []
    for i in range(count):
        prompt = [draw.randrange(3, 320) for _ in range(draw.choice([1, 7, 31, 33, 90]))]
        base = {"max_tokens": draw.randrange(7, longest), "temperature": 1.0, "seed": i}
        out.append(request(f"r{i}", prompt, **{**base, **KINDS[i % len(KINDS)]}))
    return out


@pytest.fixture
def alone(make_engine: Make) -> Callable[[Request], list[int]]:
    def run(r: Request) -> list[int]:
        engine = make_engine()
        engine.generate(0, r)
        return drain(engine)[0]

    return run


Alone = Callable[[Request], list[int]]


def test_sampling_alone_equals_sampling_in_a_mixed_batch(make_engine: Make, alone: Alone) -> None:
    """32 requests of every kind, coming and going; with few pages some are preempted."""
    wanted = {i: alone(r) for i, r in enumerate(requests(32))}
    for pages in (256, 20):
        engine = make_engine(max_batch=32, pages=pages, chunk=32)
        for i, r in enumerate(requests(32)):
            engine.generate(i, r)
        out: dict[int, list[int]] = {}
        preempted = 0
        while plan := engine.plan():
            for token in engine.run(plan):
                out.setdefault(token.handle, []).append(token.token)
            everyone = engine.scheduler.sequences.values()
            preempted += sum(s.started and s.phase is Phase.WAITING for s in everyone)
        assert out == wanted
        assert (preempted > 0) == (pages == 20)


def test_penalties_hold_after_resume_and_transfer(make_engine: Make, alone: Alone) -> None:
    for r in requests(12, longest=12):
        whole = alone(r)
        for at in (1, len(whole) // 2):
            assert alone(r.resumed(whole[:at])) == whole[at:]
        p, d = make_engine(), make_engine()
        d.receive(0, r)
        d.reserve(0)
        p.prefill(0, r)
        first = drain(p)[0]
        d.plan()
        for piece in split_into_pieces(
            0, p.computed_blocks(0), 3, p.format.block_layer_bytes(Codec.RAW), 1 << 20
        ):
            frame = torch.zeros(1 << 20, dtype=torch.uint8)
            d.write(0, piece, frame[: p.read(0, piece, frame)])
        d.join(0, first[0])
        assert first + drain(d)[0] == whole


def test_penalties_and_filters_change_the_text(alone: Alone) -> None:
    plain = alone(request("a", [5, 6], max_tokens=60))
    liked = {"max_tokens": 60, "logit_bias": ((9, 40.0),)}
    assert alone(request("a", [5, 6], **liked)) == [9] * 60
    for penalty in ({"frequency_penalty": 2.0}, {"repetition_penalty": 10.0}):
        assert 1 <= alone(request("a", [5, 6], **liked, **penalty)).count(9) < 40
    drawn = {"max_tokens": 60, "temperature": 3.0, "seed": 5}
    assert alone(request("a", [5, 6], **drawn, top_k=1)) == plain
    assert alone(request("a", [5, 6], **drawn, min_p=1.0)) == plain
    assert alone(request("a", [5, 6], **drawn, top_p=1e-6)) == plain
    assert alone(request("a", [5, 6], **drawn)) != plain


def test_choices_of_a_request_have_their_own_noise(alone: Alone) -> None:
    texts = [
        tuple(alone(request("a", [5, 6], temperature=1.0, seed=3, choice=choice)))
        for choice in range(5)
    ]
    assert len(set(texts)) == 5


@pytest.mark.parametrize("ends", [{"logit_bias": ((EOS, 100.0),)}, {"stop_token_ids": (7,)}])
def test_min_tokens_delays_the_end(make_engine: Make, ends: dict[str, Any]) -> None:
    if "stop_token_ids" in ends:
        ends = {**ends, "logit_bias": ((7, 100.0),), "ignore_eos": True}
    else:
        ends = {**ends, "ignore_eos": False}
    end = ends["logit_bias"][0][0]
    for least in (0, 1, 5):
        engine = make_engine()
        engine.generate(0, request("a", [5, 6], max_tokens=9, min_tokens=least, **ends))
        out = []
        while plan := engine.plan():
            out += engine.run(plan)
        assert [t.token for t in out].index(end) == least == len(out) - 1
        assert out[-1].finish is Finish.STOP


@pytest.mark.parametrize(
    "field",
    [
        {"stop_token_ids": (320,)},
        {"logit_bias": ((320, 1.0),)},
        {"allowed_token_ids": (5, 320)},
        {"logprob_token_ids": (320,), "logprobs": 0},
    ],
)
def test_a_token_id_outside_the_vocabulary_is_refused(
    make_engine: Make, field: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match="320") as caught:
        make_engine().generate(0, request("a", [5], **field))
    assert caught.value.param == next(iter(field))


@pytest.mark.parametrize("changes", [{}, {"temperature": 2.0}, {"temperature": 2.0, "top_p": 0.9}])
def test_only_allowed_tokens_are_drawn(alone: Alone, changes: dict[str, Any]) -> None:
    """Also where other tokens are liked better, and every choice is the one of the logits."""
    r = request("a", [5, 6], max_tokens=40, logit_bias=((8, 100.0),), **changes)
    plain = alone(r)
    assert 8 in plain
    allowed = (7, 9, 11, 13, 300)
    limited = alone(request("a", [5, 6], max_tokens=40, allowed_token_ids=allowed, **changes))
    assert set(limited) <= set(allowed)
    everything = tuple(range(320))
    same = request("a", [5, 6], max_tokens=40, allowed_token_ids=everything, **changes)
    assert alone(same) == alone(request("a", [5, 6], max_tokens=40, **changes))


def test_min_tokens_leaves_an_end_token_where_nothing_else_is_allowed(alone: Alone) -> None:
    least = {"min_tokens": 5, "ignore_eos": False, "max_tokens": 9}
    assert alone(request("a", [5, 6], allowed_token_ids=(EOS,), **least)) == [EOS]
    liked = {"logit_bias": ((EOS, 100.0),), "allowed_token_ids": (EOS, 9)}
    assert alone(request("a", [5, 6], **liked, **least)) == [9] * 5 + [EOS]


def collect(engine: Engine) -> dict[int, list[Logprobs | None]]:
    out: dict[int, list[Logprobs | None]] = {}
    while plan := engine.plan():
        for token in engine.run(plan):
            assert token.logprobs is None or token.logprobs.logprob <= 0
            out.setdefault(token.handle, []).append(token.logprobs)
    return out


WANTED = tuple(range(0, 320, 3))


def test_logprobs_are_those_of_transformers(make_engine: Make, tiny_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    asking = [
        request("a", [5, 6, 7], max_tokens=12, logprobs=5),
        request("b", [8, 9], max_tokens=12, logprobs=20, temperature=1.5, seed=2),
        request("c", [8], max_tokens=12, logprobs=0, temperature=1.0, top_k=9),
        request("d", [4] * 40, max_tokens=12, logprobs=1, **KINDS[5]),
        request("e", [4], max_tokens=12),
        request("f", [4, 9], max_tokens=12, logprobs=320, temperature=1.0),
        request("g", [9], max_tokens=12, logprobs=0, logprob_token_ids=WANTED, temperature=1.0),
        request("h", [9, 7], max_tokens=12, logprobs=0, logprob_token_ids=(319,)),
    ]
    engine = make_engine()
    for i, r in enumerate(asking):
        engine.generate(i, r)
    sequences = {i: engine.scheduler.sequences[i] for i in range(len(asking))}
    reports = collect(engine)
    assert reports.pop(4) == [None] * 12
    for i, entries in reports.items():
        tokens, prompt = sequences[i].tokens, len(asking[i].prompt)
        with torch.inference_mode():
            every = theirs(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
        for at, entry in enumerate(entries, prompt):
            assert entry is not None
            row = every[at - 1]
            assert entry.logprob == pytest.approx(float(row[tokens[at]]), abs=1e-3)
            assert entry.rank == int((row > row[tokens[at]]).sum()) + 1
            wanted = asking[i].sampling.logprob_token_ids
            if wanted:
                before = () if tokens[at] in wanted else (tokens[at],)
                assert entry.top_tokens == [*before, *wanted]
            else:
                top = row.topk(asking[i].sampling.logprobs or 0)
                assert entry.top_tokens == top.indices.tolist()
            values = row[entry.top_tokens].tolist()
            assert entry.top_logprobs == pytest.approx(values, abs=1e-3)


def test_large_sampling_tables_are_allocated_on_first_use(make_engine: Make) -> None:
    engine = make_engine()
    engine.generate(0, request("a", [5], temperature=1.0, top_p=0.5, top_k=3, logprobs=2))
    drain(engine)
    table = engine.state.sampling
    assert (table.history, table.bias, table.ends, table.forbidden) == (None,) * 4


def test_step_does_no_work_per_row_for_an_unchanged_batch(make_engine: Make) -> None:
    engine = make_engine()
    for i, r in enumerate(requests(8)):
        engine.generate(i, r)
    engine.run(engine.plan())
    kept = set()
    while len(engine.scheduler.decoding) == 8 or engine.scheduler.prefilling:
        engine.run(engine.plan())
        if len(engine.scheduler.decoding) == 8:
            kept.add(id(engine._stepper._verifier._draw._metadata))
    assert len(kept) == 1
