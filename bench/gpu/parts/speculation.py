"""Speculation beside plain decoding: what verifying costs, and a pass of a draft model.

The target has Llama-3.2-1B's shape in bf16 and repeats its prompt (bench/speculation/
copying_model.py), so that its text is known beforehand and does not depend on rounding. Drafts are
synthetic, where each next token is right with a probability of 0.8 at no cost, or come from prompt
lookup, at a fixed length and at the controller's. Beside a speed-up stands that of the formula,
from measured times. A draft model of the same shape with random weights proposes 4 tokens; how long
that takes does not depend on its weights.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.gpu.part import GpuResult, PartContext
from bench.lib.report import median
from bench.lib.roofline import seconds
from bench.speculation.contestants import (
    LONGEST,
    DecodingContestant,
    DecodingLoad,
    MakeProposer,
    Slices,
    compete,
)
from bench.speculation.copying_model import PERIOD, CopyingWeights
from bench.speculation.measurements import SpeedupCell, speedup
from bench.speculation.targets import SyntheticProposer, ngram
from engine.execution.engine import Engine
from engine.execution.speculation_loading import dummy_pass
from engine.model.decoder import DecoderModel
from engine.model.layers import ModelWeights, build_weights
from engine.model.weights import random_weights
from engine.model_config.config import ModelConfig
from engine.model_config.families import parse_config
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.control.draft_lengths import FixedDraftLength
from engine.speculation.drafts import Drafts
from engine.speculation.proposers.draft_model import DraftModel
from protocol.block_keys import BLOCK_TOKENS

LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 128001,
}
TINY_COPYING: dict[str, Any] = {
    **LLAMA_3_2_1B,
    "vocab_size": 640,
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 2,
}
ACCEPTANCE = 0.8
MOST = 8
TEXT = 128
DRAFTED = 4
"""Tokens that the draft model proposes for a sequence."""


@dataclass(frozen=True)
class SpeculationSizes:
    batches: Sequence[int]
    lengths: Sequence[int]
    slices: Slices


FULL = SpeculationSizes((1, 16, 64), (1, 4, 8), Slices(6, 32))
SMALL = SpeculationSizes((1, 3), (2,), Slices(2, 32))


class SpeculationBenchmark:
    """One model, and the two contestants that share its weights."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, sizes: SpeculationSizes) -> None:
        self._config, self._weights, self._sizes = config, weights, sizes
        draw = random.Random(0)
        self._prompts = [
            tuple(draw.randrange(3, config.vocab_size) for _ in range(PERIOD))
            for _ in range(max(sizes.batches))
        ]
        self._plain = self._contestant()
        self._other = self._contestant()
        self._plain.engine.record_graphs(lambda _: None)
        self._recorded = False  # steps with drafts

    def _contestant(self) -> DecodingContestant:
        most = max(self._sizes.batches)
        # A sequence may run ahead of the others until it has said all that there is to say.
        pages = most * (LONGEST // BLOCK_TOKENS + 1)
        return DecodingContestant(self._config, self._weights, most, pages)

    def _text(self, handle: str) -> tuple[int, ...]:
        """Return the text of a request: its prompt again and again."""
        return self._prompts[int(handle)] * (LONGEST // PERIOD)

    def cells(self) -> Iterator[SpeedupCell]:
        def synthetic(_: Engine, most: int) -> SyntheticProposer:
            return SyntheticProposer(most, self._text, ACCEPTANCE)

        for batch in self._sizes.batches:
            for k in self._sizes.lengths:
                yield self.cell(f"synthetic acceptance {ACCEPTANCE}", synthetic, batch, k)
            yield self.cell("ngram, copying", ngram(), batch, max(self._sizes.lengths))
            yield self.cell("ngram, copying", ngram(), batch, 0)

    def cell(self, subject: str, make: MakeProposer, batch: int, length: int) -> SpeedupCell:
        """Time plain decoding and decoding with drafts by turns; length 0: the controller's."""
        plain, other = self._plain, self._other
        other.equip(make, length or MOST, FixedDraftLength(length) if length else None)
        if not self._recorded:  # they are the same for all proposers
            other.engine.record_graphs(lambda _: None)
            self._recorded = True
        loads = [DecodingLoad(self._prompts[:batch], TEXT)]
        ours, theirs = compete([plain, other], loads, self._sizes.slices)
        for contestant, rows in ((plain, batch), (other, batch * (1 + length))):
            contestant.seen.pass_s = self._pass_s(rows) * contestant.seen.steps
        ratio = speedup(ours, theirs)
        return SpeedupCell(subject, batch, length, ratio, plain.seen, other.seen)

    def _pass_s(self, rows: int) -> float:
        """Time the model's pass alone, because a step on a GPU does not know what it waits for."""
        engine = self._other.engine  # its steps with drafts are recorded too
        run = dummy_pass(engine)
        taken = seconds(lambda: run(rows), engine.model.device)
        engine.manager.evict_unused()  # it wrote where prompts were cached
        return taken


class TimedDraftModel(DraftModel):
    """A draft model that waits for its drafts and notes how long they took."""

    taken: list[float]

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        """Return chains for ``sequences`` [B]; rows: [B] int64."""
        _wait(rows.device)
        began = time.perf_counter()
        drafts = super().propose(sequences, rows, wanted)
        _wait(rows.device)
        if self.caught_up_s == 0.0 and all(drafts.counts):
            self.taken.append(time.perf_counter() - began)
        return drafts


def draft_maker(config: ModelConfig, taken: list[float]) -> MakeProposer:
    """Return a maker of draft models with random weights, whose times go to ``taken``."""

    def make(engine: Engine, most: int) -> TimedDraftModel:
        weights = random_weights(config, engine.model.dtype, engine.model.device)
        model = DecoderModel(config, weights, LONGEST)
        pages = engine.config.pages
        made = TimedDraftModel(model, engine.state, pages=pages, positions=LONGEST, most=most)
        made.taken = taken
        made.record_graphs(lambda _: None)
        return made

    return make


def measure_speculation(context: PartContext) -> None:
    """Measure the part ``speculation``."""
    sizes = SMALL if context.tiny else FULL
    config = parse_config(TINY_COPYING if context.tiny else LLAMA_3_2_1B, "bench.gpu")
    weights = weights_of(config, context.dtype, context.device)
    bench = SpeculationBenchmark(config, weights, sizes)
    for cell in bench.cells():
        _add(context, cell)
    for batch in sizes.batches[:2]:
        taken: list[float] = []
        bench.cell("draft model", draft_maker(config, taken), batch, DRAFTED)
        name = f"draft model of the target's size, batch {batch}: a pass"
        each = median(taken) / DRAFTED
        context.add(GpuResult(name, each * 1e3, "ms", f"{len(taken)} proposals of {DRAFTED}"))


def _add(context: PartContext, cell: SpeedupCell) -> None:
    for row in cell.rows():
        context.add(GpuResult(row.name, row.value, row.unit, row.against, row.ratio))
    if cell.length and cell.subject.startswith("synthetic"):
        plain, seen = cell.plain, cell.seen
        alone = plain.seconds / plain.steps
        step = (seen.seconds - seen.draft_s) / seen.steps
        name = f"verifying {cell.length} drafts each, batch {cell.batch}: a step"
        text = f"plain {alone * 1e3:.3g} ms"
        context.add(GpuResult(name, step * 1e3, "ms", text, alone / step))


def weights_of(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    make = CopyingWeights(config, device)
    get: Callable[[str, tuple[int, ...]], torch.Tensor]
    get = lambda name, shape: make(name, shape).to(dtype)  # noqa: E731
    return build_weights(get, config)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
