"""The models that `bench.speculation` measures, their proposers and their prompts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.lib.engines import SHAPE_100M
from bench.speculation.contestants import MakeProposer, Tokens
from bench.speculation.copying_model import PERIOD, make_copying
from bench.speculation.grown_model import grow, grow_heads
from cluster.models.locate import demo_path
from engine.demo.training.corpus import read_corpus
from engine.execution.speculation_loading import load_proposer
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.draft_source import DraftMethod, DraftSource
from engine.speculation.drafts import Drafts
from engine.speculation.proposers.ngram import NgramProposer
from engine.speculation.proposers.proposer import Proposer
from protocol.block_keys import BLOCK_TOKENS

TextOf = Callable[[str], Sequence[int]]
"""Returns all tokens of the request with a given id, prompt and output."""


class RandomProposer(Proposer):
    """Proposes random tokens, which are hardly ever accepted."""

    name = "random"

    def __init__(self, most: int, vocab: int) -> None:
        self.most = most
        self._vocab = vocab
        self._generator = torch.Generator().manual_seed(0)

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        """Return ``wanted`` draft tokens per sequence; ``rows`` [sequences] gives the device."""
        size = (sum(wanted),)
        tokens = torch.randint(self._vocab, size, generator=self._generator).to(rows.device)
        return Drafts(wanted, tokens)


class SyntheticProposer(Proposer):
    """Proposes each token of the known text with probability ``acceptance``, else a wrong one.

    It stands for a draft model with that acceptance rate where none has been trained.
    """

    name = "synthetic"

    def __init__(self, most: int, text: TextOf, acceptance: float) -> None:
        self.most = most
        self._text, self._acceptance = text, acceptance
        self._draw = random.Random(0)

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        """Return ``wanted`` draft tokens per sequence; ``rows`` [sequences] gives the device."""
        tokens: list[int] = []
        for sequence, count in zip(sequences, wanted, strict=True):
            at = len(sequence.tokens)
            known = self._text(sequence.request.id)[at : at + count]
            assert len(known) == count, "the text is not known so far"
            tokens += [t if self._draw.random() < self._acceptance else t ^ 1 for t in known]
        return Drafts(wanted, torch.tensor(tokens, dtype=torch.int64, device=rows.device))


def ngram() -> MakeProposer:
    return lambda engine, most: NgramProposer(most)


def guess() -> MakeProposer:
    return lambda engine, most: RandomProposer(most, engine.model.config.vocab_size)


def of_folder(method: DraftMethod, folder: Path, target: Path) -> MakeProposer:
    """Load a draft model, or heads, of the model in ``target``."""
    return lambda engine, most: load_proposer(DraftSource(method, folder), engine, most, target)


class HeldOutTexts:
    """The tokenized held-out files of the demo model's corpus."""

    def __init__(self) -> None:
        tokenizer = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))
        self._files = [file.ids for file in tokenizer.encode_batch(read_corpus().held_out)]

    def stretches(self, length: int) -> Iterator[Tokens]:
        """Yield stretches of ``length`` tokens without end: the first of each file comes first."""
        starts = (
            (file, at)
            for at in itertools.count(0, length)
            for file in self._files
            if at + length <= len(file)
        )
        longest = sum(max(0, len(file) // length) for file in self._files)
        assert longest, f"no held-out file has {length} tokens"
        found = [tuple(file[at : at + length]) for file, at in itertools.islice(starts, longest)]
        return itertools.cycle(found)


HEADS: tuple[DraftMethod, ...] = ("medusa", "eagle")
PROMPT = 2 * BLOCK_TOKENS + 1  # so that all but one token are found again


@dataclass(frozen=True)
class SpeculationTarget:
    """A model, its proposers and its prompts."""

    name: str
    folder: Path
    proposers: Mapping[str, MakeProposer]
    prompts: Iterator[Tokens]
    batches: Sequence[int] | None = None  # None: the plan's


def targets(home: Path) -> Iterator[SpeculationTarget]:
    """Yield the targets; each model is made when its turn comes."""
    demo = demo_path()
    texts = HeldOutTexts()
    heads = [kind for kind in HEADS if (demo.parent / kind / "model.safetensors").is_file()]
    draft = of_folder("draft", demo.parent / "draft", demo)
    made: dict[str, MakeProposer] = {"ngram": ngram(), "draft": draft, "random": guess()}
    for kind in heads:
        made[kind] = of_folder(kind, demo.parent / kind, demo)
    yield SpeculationTarget("demo", demo, made, texts.stretches(PROMPT))
    large = grow(demo, home / "grown")
    made = dict(made)
    for kind in heads:
        folder = grow_heads(demo.parent / kind, home / kind, SHAPE_100M)
        made[kind] = of_folder(kind, folder, large)
    yield SpeculationTarget("grown", large, made, texts.stretches(PROMPT))
    for name, shape in (("copying", {}), ("copying-100M", SHAPE_100M)):
        folder = make_copying(demo, home / name, shape)
        yield SpeculationTarget(
            name, folder, {"ngram": ngram()}, texts.stretches(PERIOD), (1, 8, 32)
        )
