"""The kernels' draw against the sampler's torch code on a CPU: the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels.sampling import DrawRows, DrawState, DrawWorkspace, GrammarBits, draw_tokens
from engine.sampling.filters import NoiseRows, gumbel_noise, sample_unfiltered
from engine.sampling.sampling_table import FLOAT_COLUMNS, INT_COLUMNS, SamplingTable
from engine.structured_output.masks import bitmask_words, unpack_bits
from protocol.sampling_params import GREEDY_BELOW
from tests.engine.sampling_oracle import options, seated

STATE_ROWS = 12
SHAPES = [(1, 128_256), (2, 32_003), (9, 1000), (5, 1024), (3, 1025), (4, 7)]
NAN, INF = float("nan"), float("inf")


def random_state(device: torch.device, seed: int = 0) -> DrawState:
    """State rows of which every third is greedy, as columns of wider tables."""
    generator = torch.Generator().manual_seed(seed)
    floats = torch.rand(STATE_ROWS, 6, generator=generator) * 2 + 0.1
    floats[::3, 2] = 0
    ints = torch.randint(-(2**63), 2**63 - 1, (STATE_ROWS, 3), generator=generator)
    length = torch.randint(1, 100_000, (STATE_ROWS,), generator=generator)
    return DrawState(
        temperature=floats.to(device)[:, 2],
        keys=ints.to(device)[:, 0],
        length=length.to(device),
        last_token=torch.zeros(STATE_ROWS, dtype=torch.int64, device=device),
    )


def reference(logits: Tensor, rows: Tensor, state: DrawState, positions: Tensor | None) -> Tensor:
    """Tokens [R] that the sampler draws on a CPU."""
    logits, own = logits.cpu(), rows.cpu()
    temperature = state.temperature.cpu()[own]
    at = state.length.cpu()[own] if positions is None else positions.cpu()
    greedy = temperature == 0
    noise = NoiseRows(temperature.masked_fill(greedy, 1.0), state.keys.cpu()[own], at)
    return torch.where(greedy, logits.max(dim=-1).indices, sample_unfiltered(logits, noise))


def draw(
    logits: Tensor, rows: Tensor, state: DrawState, grammar: GrammarBits | None = None
) -> list[int]:
    workspace = DrawWorkspace(len(rows) + 1, logits.shape[1], logits.device)
    drawn: list[int] = draw_tokens(
        logits, DrawRows(rows), state, workspace, grammar=grammar
    ).tolist()
    return drawn


def random_logits(rows: int, vocab: int, device: torch.device) -> Tensor:
    """Logits whose rows are further apart than they are long."""
    generator = torch.Generator().manual_seed(vocab)
    return (torch.randn(rows, vocab + 5, generator=generator) * 3).to(device)[:, :vocab]


@pytest.mark.parametrize(("count", "vocab"), SHAPES)
def test_draw_equals_the_samplers_and_updates_the_state(
    count: int, vocab: int, device: torch.device
) -> None:
    state, logits = random_state(device), random_logits(count, vocab, device)
    rows = torch.arange(1, count + 1, device=device).flip(0)
    wanted, length = reference(logits, rows, state, None), state.length.clone()
    assert draw(logits, rows, state) == wanted.tolist()
    length[rows] += 1
    last = torch.zeros(STATE_ROWS, dtype=torch.int64)
    last[rows.cpu()] = wanted
    assert torch.equal(state.length, length) and torch.equal(state.last_token.cpu(), last)


def test_verified_rows_share_a_state_row_that_is_not_updated(device: torch.device) -> None:
    state, logits = random_state(device), random_logits(9, 1000, device)
    owner = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 3], device=device)
    depth = torch.tensor([0, 1, 2, 2, 0, 1, 0, 1, 0], device=device)
    state_row = torch.tensor([4, 3, 1, 0], device=device)
    count = torch.tensor([4, 2, 2, 0], device=device)
    before = state.length.clone()
    draws = before[state_row][owner] + depth
    rows = DrawRows(state_row, count, owner, draws - 1)
    workspace = DrawWorkspace(9, 1000, device)
    drawn = draw_tokens(logits, rows, state, workspace, update=False).tolist()
    wanted = reference(logits, state_row[owner], state, draws).tolist()
    assert drawn == [*wanted[:8], 0], "the last one is padding"
    assert torch.equal(state.length, before) and not state.last_token.any()


def test_noise_decides_between_scores_that_fp32_cannot_tell_apart(device: torch.device) -> None:
    """Logits that cancel the noise of some tokens: their scores differ by a millionth."""
    vocab, rows = 2050, torch.arange(8, device=device)
    state = random_state(device)
    state = replace(state, temperature=torch.ones_like(state.temperature))
    noise = gumbel_noise(state.keys.cpu()[:8], state.length.cpu()[:8], torch.arange(vocab))
    generator = torch.Generator().manual_seed(2)
    noise -= torch.rand(noise.shape, generator=generator, dtype=torch.float64) * 1e-6
    logits = (-noise).float().to(device)
    logits[:, torch.arange(vocab) % 40 > 0] -= 20
    wanted = reference(logits, rows, state, None).tolist()
    assert draw(logits, rows, state) == wanted


@pytest.mark.parametrize("left", [1, 40, 900])
def test_grammar_bits_are_read_in_place(left: int, device: torch.device) -> None:
    vocab, rows = 1500, torch.arange(6, device=device)
    state, logits = random_state(device), random_logits(6, vocab, device)
    generator = torch.Generator().manual_seed(left)
    order = torch.rand(4, bitmask_words(vocab) * 32, generator=generator).argsort(dim=-1)
    allowed = torch.zeros(order.shape, dtype=torch.int32).scatter_(1, order[:, :left], 1)
    weights = torch.ones(32, dtype=torch.int32) << torch.arange(32, dtype=torch.int32)
    bits = (allowed.view(4, -1, 32) * weights).sum(dim=-1).to(torch.int32)
    index = torch.tensor([2, -1, 0, -1, 0, 3], dtype=torch.int32)
    forbidden = ~unpack_bits(bits, vocab)
    masked = logits.cpu().clone()
    for row, own in enumerate(index.tolist()):
        if own >= 0:
            masked[row, forbidden[own]] = -INF
    wanted = reference(masked, rows, state, None).tolist()
    assert draw(logits, rows, state, GrammarBits(bits.to(device), index.to(device))) == wanted


def test_row_that_may_draw_nothing_draws_token_0(device: torch.device) -> None:
    state, logits = random_state(device), random_logits(2, 1500, device)
    grammar = GrammarBits(
        torch.zeros(1, bitmask_words(1500), dtype=torch.int32, device=device),
        torch.zeros(2, dtype=torch.int32, device=device),
    )
    assert draw(logits, torch.tensor([0, 1], device=device), state, grammar) == [0, 0]


@pytest.mark.parametrize("row", [0, 1])  # greedy, random
@pytest.mark.parametrize(
    ("values", "token"),
    [
        ({}, 0),
        ({5: INF, 1400: INF}, 5),
        ({5: INF, 1030: NAN, 1400: NAN}, 1030),
        ({3: -INF, 1499: NAN}, 1499),
        (dict.fromkeys(range(1500), NAN), 0),
    ],
)
def test_logits_that_are_not_finite_draw_as_on_a_cpu(
    row: int, values: dict[int, float], token: int, device: torch.device
) -> None:
    state, rows = random_state(device), torch.tensor([row], device=device)
    logits = torch.full((1, 1500), 0.0 if values else -INF, device=device)
    for at, value in values.items():
        logits[0, at] = value
    assert draw(logits, rows, state) == reference(logits, rows, state, None).tolist() == [token]


def test_lowest_token_wins_among_equal_greedy_logits(device: torch.device) -> None:
    state, rows = random_state(device), torch.tensor([0, 3], device=device)
    logits = torch.zeros(2, 3000, device=device)
    logits[0, [2900, 1100]] = 1.0
    logits[1, 7] = -0.0
    assert draw(logits, rows, state) == [1100, 0]


def test_padding_draws_token_0_and_updates_nothing(device: torch.device) -> None:
    state, logits = random_state(device), random_logits(5, 1000, device)
    logits[2:] = torch.tensor([NAN, INF, -INF], device=device)[:, None]
    rows = torch.tensor([1, 0, 0, 0, 7], device=device)
    wanted, length = reference(logits[:2], rows[:2], state, None).tolist(), state.length.clone()
    count = torch.tensor([1, 1, 0, 0, 0], device=device)
    workspace = DrawWorkspace(5, 1000, device)
    drawn = draw_tokens(logits, DrawRows(rows, count), state, workspace)
    assert drawn.tolist() == [*wanted, 0, 0, 0]
    length[:2] += 1
    assert torch.equal(state.length, length)
    assert state.last_token[:2].tolist() == [wanted[1], wanted[0]]
    assert not state.last_token[2:].any()


def test_table_has_the_columns_and_a_temperature_of_0_for_greedy_rows(
    device: torch.device,
) -> None:
    samplings = [
        options(temperature=temperature, seed=7, choice=choice)
        for choice, temperature in enumerate([0.0, GREEDY_BELOW / 2, GREEDY_BELOW, 0.8])
    ]
    _, rows, table = seated(samplings, [5, 6], [7], 1000, str(device))
    state = state_of(table)
    assert state.temperature[rows].tolist() == pytest.approx([0, 0, GREEDY_BELOW, 0.8])
    logits = random_logits(4, 1000, device)
    wanted = reference(logits, rows, state, None).tolist()
    assert draw(logits, rows, state) == wanted
    assert wanted[:2] == logits[:2].max(dim=-1).indices.tolist()


def state_of(table: SamplingTable) -> DrawState:
    length = torch.full((len(table.ints),), 3, device=table.device)
    return DrawState(
        table.floats[:, FLOAT_COLUMNS.index("temperature")],
        table.ints[:, INT_COLUMNS.index("noise_key")],
        length,
        torch.zeros_like(length),
    )
