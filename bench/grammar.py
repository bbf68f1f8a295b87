"""The cost of a grammar: compiling it, the mask of a row, and a step of sixteen rows.

    python -m bench.grammar

Masks are timed while the demo tokenizer's text of a JSON document is walked through its schema, and
the same with a made-up vocabulary of 128k tokens; steps on the demo model, on this machine's CPU.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.lib.engines import engine_config
from bench.lib.report import ResultRow, finish, median, percentile
from engine.execution.engine import Engine
from engine.model.decoder import DecoderModel
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config
from engine.scheduling.step_policy import plan_decode_step
from engine.structured_output.compiler import load_grammar_tokenizer
from engine.structured_output.masks import MaskFiller, forbidden_mask
from engine.structured_output.matcher import GrammarMatcher
from protocol.requests import Request
from protocol.sampling_params import SamplingParams

DEMO = Path("engine/demo/target")
ROWS = 16
STEPS = 200
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "email": {"type": "string", "pattern": "^[a-z]+@[a-z]+[.](com|org)$"},
        "age": {"type": "integer"},
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"id": {"type": "integer"}, "note": {"type": "string"}},
                "required": ["id", "note"],
            },
        },
    },
    "required": ["name", "email", "age", "items"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}
DOCUMENT = {
    "name": "Ada Lovelace of London",
    "email": "ada@analytical.org",
    "age": 36,
    "items": [{"id": i, "note": f"the {i}th of many notes, some words long"} for i in range(6)],
}


def big_tokenizer(folder: Path, size: int = 128_000) -> Path:
    """Write a byte-level vocabulary of made-up words that are as long as real ones."""
    draw = random.Random(0)
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < size - 1:
        kind = draw.random()
        letters = "".join(draw.choices("etaoinshrdlucmfwypvbgkjqxz", k=draw.randint(2, 9)))
        if kind < 0.05:
            letters = "".join(draw.choices("0123456789", k=draw.randint(2, 3)))
        elif kind < 0.15:
            letters = "".join(draw.choices('{}[]():;,."/\\<>=+-*_', k=draw.randint(2, 4)))
        words[("\u0120" if kind > 0.5 else "") + letters] = None
    vocab = {word: i for i, word in enumerate(["<eos>", *words])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def masks(name: str, inner: LLTokenizer) -> Iterator[ResultRow]:
    """Time the masks of a document's tokens with one row and with sixteen."""
    began = time.perf_counter()
    start = GrammarMatcher.compile(inner, LLMatcher.grammar_from_json_schema(SCHEMA))
    yield ResultRow(f"{name}: compiled", (time.perf_counter() - began) * 1e3, "ms")
    tokens = inner.greedy_tokenize(json.dumps(DOCUMENT))
    device = torch.device("cpu")
    for rows in (1, ROWS):
        masker = MaskFiller()
        walkers = [start.copy() for _ in range(rows)]
        filling, unpacking = [], []
        for token in tokens:
            began = time.perf_counter()
            bits = masker.fill(walkers)
            filled = time.perf_counter()
            forbidden_mask(bits, inner.vocab_size, device)
            unpacking.append(time.perf_counter() - filled)
            filling.append(filled - began)
            assert all(walker.advance(token) for walker in walkers)
        for what, seconds in (("masks", filling), ("unpacked", unpacking)):
            for label, share in (("p50", 0.5), ("p99", 0.99)):
                value = percentile(seconds, share) * 1e6
                yield ResultRow(f"{name}, {rows} rows: {what}, {label}", value, "us")


def step_ms(engine: Engine, start: Callable[[int], None]) -> float:
    """Return the median ms of a decode step of sixteen rows."""
    for handle in range(ROWS):
        start(handle)
    while len(engine.scheduler.decoding) < ROWS:
        engine.run(engine.plan())
    times = []
    for _ in range(STEPS):
        step = engine.plan()
        began = time.perf_counter()
        engine.run(step)
        times.append(time.perf_counter() - began)
        assert len(step.decode) == ROWS
    for handle in range(ROWS):
        engine.drop(handle)
    return median(times) * 1e3


def steps(inner: LLTokenizer) -> Iterator[ResultRow]:
    """Time steps with and without a grammar in turns; the best of five rounds counts."""
    config = load_config(DEMO)
    weights = load_weights(DEMO, config, torch.float32, torch.device("cpu"))
    model = DecoderModel(config, weights, 1024)
    engine = Engine(
        model, engine_config(pages=16 * 32, max_batch=ROWS, max_model_len=1024), plan_decode_step
    )
    grammar = LLMatcher.grammar_from_json_schema(ENDLESS)
    matcher = GrammarMatcher.compile(inner, grammar)

    def begin(constrained: bool) -> Callable[[int], None]:
        def start(handle: int) -> None:
            sampling = SamplingParams(
                max_tokens=500, seed=handle, ignore_eos=True, grammar=grammar if constrained else ""
            )
            request = Request(
                id="r", prompt=(5, 6, 7 + handle), sampling=sampling, cache_root=bytes(16)
            )
            engine.generate(handle, request, matcher.copy() if constrained else None)

        return start

    rounds = [(step_ms(engine, begin(False)), step_ms(engine, begin(True))) for _ in range(5)]
    free, bound = (min(values) for values in zip(*rounds, strict=True))
    yield ResultRow(f"demo model, {ROWS} rows: a step", free, "ms")
    yield ResultRow("the same, a grammar in each row", bound, "ms", "without", free / bound)


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    demo = load_grammar_tokenizer(DEMO / "tokenizer.json", 4096, [1])
    rows = [*masks("4k tokens", demo)]
    with tempfile.TemporaryDirectory() as folder:
        path = big_tokenizer(Path(folder))
        began = time.perf_counter()
        big = load_grammar_tokenizer(path, 128_000, [0])
        rows.append(ResultRow("128k tokens: tokenizer read", time.perf_counter() - began, "s"))
        rows += masks("128k tokens", big)
    rows += steps(demo)
    finish("grammar", rows)


if __name__ == "__main__":
    main()
