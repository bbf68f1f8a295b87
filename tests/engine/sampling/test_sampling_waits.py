"""How often a draw waits for the device, counted on a CPU by the operations that wait on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine import uploads
from engine.sampling import filters, logprobs, sampler
from engine.sampling.filters import TOP_COUNTS
from engine.sampling.sampler import Sampler
from engine.sampling.sampling_metadata import DraftRows
from engine.structured_output.masks import ForbiddenTokens
from tests.engine.sampling_oracle import options, seated
from tests.engine.test_sampling_engine import KINDS

VOCAB = 2000
PROMPT, OUTPUT = [5, 6, 7, 5], [7, 8, 8]
ALWAYS_WAIT = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
}
ONCE = [kind for kind in KINDS if "logprobs" not in kind and kind.get("top_k", 0) <= TOP_COUNTS[0]]


class WaitCounter(TorchDispatchMode):
    """Counts reads by the host, and operations of which only the device knows the result's size."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func._schema.name
        masks = [
            x
            for x in (args[1] if name in ("aten::index", "aten::index_put_") else [])
            if x is not None and x.dtype in (torch.bool, torch.uint8)
        ]
        if name in ALWAYS_WAIT or masks:
            self.waits.append(name)
        return func(*args, **kwargs or {})


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    inner, reading = Tensor.tolist, uploads.read_back

    def tolist(self: Tensor) -> Any:
        counter.waits.append("tolist")
        return inner(self)

    def read_back(*tensors: Tensor) -> list[list[Any]]:
        counter.waits.append("read_back")
        with patch.object(Tensor, "tolist", inner):
            return reading(*tensors)

    with (
        WaitCounter() as counter,
        patch.object(Tensor, "tolist", tolist),
        patch.object(sampler, "read_back", read_back),
        patch.object(logprobs, "read_back", read_back),
        patch.object(filters, "read_back", read_back),
    ):
        yield counter.waits


def some_logits(rows: int) -> Tensor:
    """Peaked enough for filters to end among the most likely tokens."""
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1)) * 8


def forbidden(rows: list[int]) -> ForbiddenTokens:
    return ForbiddenTokens(rows, torch.arange(VOCAB).expand(len(rows), -1) % 3 == 0)


@pytest.mark.parametrize("kinds", [*([kind] for kind in ONCE), ONCE], ids=range(len(ONCE) + 1))
def test_draw_waits_once(kinds: list[dict[str, Any]]) -> None:
    samplings = [options(seed=i, **kind) for i, kind in enumerate(kinds)]
    sequences, rows, table = seated(samplings, PROMPT, OUTPUT, VOCAB)
    draw = Sampler(table)
    positions = torch.full((len(kinds),), len(PROMPT) + len(OUTPUT))
    for _ in range(2):  # with new metadata and with kept metadata
        with counted_waits() as waits:
            draw(sequences, some_logits(len(kinds)), rows, positions, forbidden([0])).read()
        assert waits == ["read_back"]


def test_verification_waits_once() -> None:
    count = len(ONCE)
    samplings = [options(seed=i, **kind) for i, kind in enumerate(ONCE)]
    sequences, rows, table = seated(samplings, PROMPT, OUTPUT, VOCAB)
    draw = Sampler(table)
    owner = torch.arange(count).repeat_interleave(2)
    ancestors = torch.tensor([[-1], [4]]).repeat(count, 1)
    nodes = DraftRows(owner, np.full(count, 2), torch.tensor([0, 1]).repeat(count), ancestors)
    logits, start = some_logits(2 * count), len(PROMPT) + len(OUTPUT)
    with counted_waits() as waits:
        pending = draw.verify(sequences, logits, rows, start + nodes.depth, nodes, forbidden([1]))
        pending.read(torch.tensor([4] * count))
        taken = torch.ones(count, dtype=torch.int64)
        draw.append(sequences, rows, taken * start, pending.tokens.view(count, 2), taken)
    assert waits == ["read_back"]


def test_reported_rows_wait_once_more() -> None:
    samplings = [options(seed=i, logprobs=2 * i) for i in range(3)]
    sequences, rows, table = seated(samplings, PROMPT, OUTPUT, VOCAB)
    positions = torch.full((3,), len(PROMPT) + len(OUTPUT))
    with counted_waits() as waits:
        Sampler(table)(sequences, some_logits(3), rows, positions).read()
    assert waits == ["read_back"] * 2


def test_rows_whose_filters_allow_more_than_was_searched_wait_again() -> None:
    samplings = [options(top_p=0.999), options(), options(top_k=3)]
    sequences, rows, table = seated(samplings, PROMPT, OUTPUT, VOCAB)
    positions = torch.full((3,), len(PROMPT) + len(OUTPUT))
    with counted_waits() as waits:
        Sampler(table)(sequences, some_logits(3) / 8, rows, positions).read()
    assert 2 < len(waits) < 6 and set(waits) == {"read_back"}
