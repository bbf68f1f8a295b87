"""Drafts on a device: text is as good as without them, and a step waits no more for the host."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.execution.engine import Engine
from engine.kv_cache.kv_format import Precision
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.control.draft_lengths import FixedDraftLength
from engine.speculation.control.speculator import Speculator
from engine.speculation.proposers.ngram import NgramProposer
from engine.speculation.proposers.proposer import Proposer
from protocol.requests import Request
from tests.engine.conftest import request
from tests.engine.proposers import Oracle, RandomDraft
from tests.engine.speculating import RandomLengths
from tests.gpu.test_engine import PRECISIONS, engine_on, hold, requests, run

VOCAB = 1000
FP32, BF16 = torch.float32, torch.bfloat16


def speculating(engine: Engine, proposer: Proposer, fixed: int = 0) -> Engine:
    lengths = FixedDraftLength(fixed) if fixed else RandomLengths(6)
    engine.speculate(Speculator(proposer, lengths, VOCAB))
    return engine


def accepted(engine: Engine) -> int:
    assert engine.speculator is not None and not engine.speculator.dropped
    return engine.scheduler.counters.speculation.accepted_tokens


def oracle(wanted: list[Request], texts: list[list[int]], width: int) -> Oracle:
    """Knows what was said without drafts, and with them may be said otherwise."""
    known = {r.id: [*r.prompt, *text] for r, text in zip(wanted, texts, strict=True)}

    def text(sequence: Running) -> Sequence[int]:
        return known[sequence.request.id]

    return Oracle(text, VOCAB, 8, 0.8, width)


def mixed(count: int) -> list[Request]:
    """Greedy, and drawn at a temperature."""
    greedy, drawn = requests(count), requests(count, temperature=0.8)
    return [(greedy if i % 2 else drawn)[i] for i in range(count)]


@pytest.mark.parametrize(
    ("family", "dtype", "precision", "width"),
    [
        ("llama", FP32, "exact", 1),
        ("llama", FP32, "fp8", 3),
        ("llama", BF16, "exact", 3),
        ("llama", BF16, "fp8", 1),
        ("mixtral", BF16, "exact", 3),
        ("mixtral", FP32, "fp8", 1),
        ("gemma2", BF16, "fp8", 3),
        ("gemma2", FP32, "exact", 1),
    ],
)
def test_a_batch_with_drafts(
    device: str, family: str, dtype: torch.dtype, precision: Precision, width: int
) -> None:
    wanted = mixed(12)
    plain = run(engine_on(device, dtype, precision, family), wanted)
    texts = []
    for _ in "12":
        engine = engine_on(device, dtype, precision, family)
        texts.append(run(speculating(engine, oracle(wanted, plain, width)), wanted))
        assert accepted(engine)
        assert engine.manager.available == 400
    hold(engine, zip(wanted, texts[0], strict=True), family)
    if device == "cpu":  # elsewhere sums may round otherwise from run to run
        assert texts[0] == texts[1]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_preempted_with_drafts(device: str, precision: Precision) -> None:
    engine = engine_on(device, BF16, precision, pages=16)
    wanted = requests(12, new_tokens=60)
    texts = run(speculating(engine, NgramProposer(8)), wanted)
    assert engine.scheduler.counters.preemptions and engine.manager.available == 16
    assert accepted(engine)
    hold(engine, zip(wanted, texts, strict=True))


def test_penalties_and_reports_with_drafts(device: str) -> None:
    """Draws of penalised and filtered rows are those of an engine without drafts."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "frequency_penalty": 1.0},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.2},
        {"temperature": 0.0, "logit_bias": ((5, 3.0), (6, 3.0)), "logprobs": 2},
    ]
    wanted = [requests(9, **kinds[i % 3])[i] for i in range(9)]
    plain = run(engine_on(device, FP32, "exact"), wanted)
    engine = engine_on(device, FP32, "exact")
    texts = run(speculating(engine, oracle(wanted, plain, 2)), wanted)
    assert accepted(engine)
    same = sum(a == b for a, b in zip(texts, plain, strict=True))
    assert same == 9 if device == "cpu" else same >= 7  # a tie may fall otherwise


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("nodes", [1, 6])
def test_a_step_waits_as_often_for_many_as_for_few(nodes: int) -> None:
    """What waits for the device (or copies to it at once) does so for all sequences together."""

    def waits(count: int) -> int:
        engine = engine_on("cuda", BF16, "exact")
        draw = random.Random(1)
        for handle in range(count):
            prompt = [draw.randrange(3, VOCAB) for _ in range(40)]
            engine.generate(handle, request("a", prompt, max_tokens=200))
        speculating(engine, RandomDraft(VOCAB, 8), fixed=nodes)
        for _ in range(12):
            engine.run(engine.plan())
        assert len(engine.scheduler.decoding) == count
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(4):
                    engine.run(engine.plan())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchron" in str(warning.message) for warning in caught)

    assert 0 < waits(16) <= waits(2) + 4
