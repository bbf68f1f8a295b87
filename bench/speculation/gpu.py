"""Speculation on a GPU beside plain decoding: a model of about 1.5 billion parameters in bf16.

    python -m bench.speculation.gpu
    python -m bench.speculation.gpu --device cpu --tiny     the same code, to see that it runs

The model has Llama-3.2-1B's shape and repeats its prompt (copying_model.py), so that its text is
known beforehand and does not depend on rounding. Drafts are synthetic, where each next token is
right with a probability of 0.8 at no cost, or come from prompt lookup, at a fixed length and at the
controller's. Beside a speed-up stands that of the formula, from measured times. The benchmark needs
no files, no Ray and no Redis.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.lib.report import ResultRow, finish
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
from bench.speculation.measurements import SpeedupCell, speedup, tables
from bench.speculation.targets import SyntheticProposer, ngram
from engine.execution.engine import Engine
from engine.execution.speculation_loading import dummy_pass
from engine.model.layers import ModelWeights, build_weights
from engine.model_config.config import ModelConfig
from engine.model_config.families import parse_config
from engine.speculation.control.draft_lengths import FixedDraftLength
from protocol.block_keys import BLOCK_TOKENS

LLAMA_3_2_1B = {
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
TINY = {
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


@dataclass(frozen=True)
class SpeculationSizes:
    batches: Sequence[int]
    lengths: Sequence[int]
    slices: Slices


FULL = SpeculationSizes((1, 8, 32, 64), (1, 2, 4, 8), Slices(8, 32))
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
                yield self._cell(f"synthetic acceptance {ACCEPTANCE}", synthetic, batch, k)
            yield self._cell("ngram, copying", ngram(), batch, max(self._sizes.lengths))
            yield self._cell("ngram, copying", ngram(), batch, 0)

    def _cell(self, subject: str, make: MakeProposer, batch: int, length: int) -> SpeedupCell:
        plain, other = self._plain, self._other
        other.equip(make, length or MOST, FixedDraftLength(length) if length else None)
        loads = [DecodingLoad(self._prompts[:batch], TEXT)]
        ours, theirs = compete([plain, other], loads, self._sizes.slices)
        for contestant, rows in ((plain, batch), (other, batch * (1 + length))):
            contestant.seen.pass_s = self._pass_s(rows) * contestant.seen.steps
        ratio = speedup(ours, theirs)
        return SpeedupCell(subject, batch, length, ratio, plain.seen, other.seen)

    def _pass_s(self, rows: int) -> float:
        """Time the model's pass alone, because a step on a GPU does not know what it waits for."""
        engine = self._plain.engine
        run = dummy_pass(engine)
        taken = seconds(lambda: run(rows), engine.model.device)
        engine.manager.evict_unused()  # it wrote where prompts were cached
        return taken


def weights_of(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    make = CopyingWeights(config, device)
    get: Callable[[str, tuple[int, ...]], torch.Tensor]
    get = lambda name, shape: make(name, shape).to(dtype)  # noqa: E731
    return build_weights(get, config)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda (the default) or cpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to see that it runs")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu --tiny runs the same code without one")
    torch.set_grad_enabled(False)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    config = parse_config(TINY if chosen.tiny else LLAMA_3_2_1B, "speculation_gpu")
    bench = SpeculationBenchmark(
        config, weights_of(config, dtype, device), SMALL if chosen.tiny else FULL
    )
    rows: list[ResultRow] = []
    cells: list[SpeedupCell] = []
    for cell in bench.cells():
        cells.append(cell)
        rows += cell.rows()
    print(*tables(cells), sep="\n")
    finish("speculation_gpu", rows)


if __name__ == "__main__":
    main()
