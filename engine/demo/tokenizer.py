"""The pair's tokenizer: a byte-level BPE trained on the corpus, and documents encoded with it."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS = "<|bos|>", "<|eos|>"
VOCAB_SIZE = 4096

Tokens = NDArray[np.int64]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE. No post-processor: ``encode`` never adds a special token by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """The ids of ``BOS`` and ``EOS``."""
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    assert bos is not None and eos is not None
    return bos, eos


def encode(
    tokenizer: Tokenizer, texts: list[str], *, anywhere: float = 0.0, after_space: float = 0.0
) -> list[Tokens]:
    """Each document as bos + tokens + eos.

    A prompt may end after a space or inside a word, where whole text has no token boundary. So that
    the model sees such places in training, the text is cut, with these probabilities, at any
    character and where whitespace ends; the pieces are tokenized apart.
    """
    bos, eos = special_ids(tokenizer)
    rng = np.random.default_rng(0)
    docs = []
    for text in texts:
        cuts = set(rng.integers(len(text), size=int(len(text) * anywhere)).tolist())
        ends = [m.end() for m in re.finditer(r"\s+(?=\S)", text)]
        cuts.update(np.array(ends, dtype=np.int64)[rng.random(len(ends)) < after_space].tolist())
        pieces = [text[a:b] for a, b in pairwise([0, *sorted(cuts), len(text)])]
        ids = [i for e in tokenizer.encode_batch(pieces) for i in e.ids]
        docs.append(np.array([bos, *ids, eos], dtype=np.int64))
    return docs
