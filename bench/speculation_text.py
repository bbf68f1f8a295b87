"""Prompts for the benchmark of speculation: held-out code of the demo's corpus."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tokenizers import Tokenizer

from cluster.models import demo_path
from engine.demo.corpus import read_corpus

Tokens = tuple[int, ...]


class Texts:
    """The held-out files, tokenized."""

    def __init__(self) -> None:
        tokenizer = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))
        self._files = [file.ids for file in tokenizer.encode_batch(read_corpus().held_out)]

    def stretches(self, length: int) -> Iterator[Tokens]:
        """Stretches of ``length`` tokens for ever: of each file the first, then the second, ..."""
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
