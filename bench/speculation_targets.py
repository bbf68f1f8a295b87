"""What the benchmark of speculation measures: models, and what drafts for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.copying_model import PERIOD, make_copying
from bench.grown_heads import grow_heads
from bench.grown_model import grow
from bench.random_model import SHAPE_100M
from bench.speculation_proposers import guess, ngram, of_folder
from bench.speculation_runs import Make
from bench.speculation_text import Texts, Tokens
from cluster.models import demo_path
from engine.speculation.source import Method
from protocol.blocks import BLOCK_TOKENS

HEADS: tuple[Method, ...] = ("medusa", "eagle")
PROMPT = 2 * BLOCK_TOKENS + 1  # so that all but one token are found again


@dataclass(frozen=True)
class Target:
    """A model, what drafts for it, and what it is given to say."""

    name: str
    folder: Path
    proposers: Mapping[str, Make]
    prompts: Iterator[Tokens]
    batches: Sequence[int] | None = None  # None: the plan's


def targets(home: Path) -> Iterator[Target]:
    """One at a time: each is made when it is its turn."""
    demo = demo_path()
    texts = Texts()
    heads = [kind for kind in HEADS if (demo.parent / kind / "model.safetensors").is_file()]
    draft = of_folder("draft", demo.parent / "draft", demo)
    made: dict[str, Make] = {"ngram": ngram(), "draft": draft, "random": guess()}
    for kind in heads:
        made[kind] = of_folder(kind, demo.parent / kind, demo)
    yield Target("demo", demo, made, texts.stretches(PROMPT))
    large = grow(demo, home / "grown")
    made = dict(made)
    for kind in heads:
        folder = grow_heads(demo.parent / kind, home / kind, SHAPE_100M)
        made[kind] = of_folder(kind, folder, large)
    yield Target("grown", large, made, texts.stretches(PROMPT))
    for name, shape in (("copying", {}), ("copying-100M", SHAPE_100M)):
        folder = make_copying(demo, home / name, shape)
        yield Target(name, folder, {"ngram": ngram()}, texts.stretches(PERIOD), (1, 8, 32))
