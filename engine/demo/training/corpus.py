"""Text of the demo models, from the Python standard library to batches of token windows.

``read_corpus`` splits the library into training and held-out files, ``train_tokenizer`` trains the
byte-level BPE tokenizer that target and draft share, and ``WindowPacker`` packs encoded documents
into training batches. The two training scripts call all of it; benchmarks read the held-out files.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

HELD_OUT_PERCENT = 3
# Tests are left out, and so are modules that contain tables of data rather than code.
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")  # build settings of the local interpreter
BOS, EOS = "<|bos|>", "<|eos|>"
VOCAB_SIZE = 4096

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Corpus:
    """Texts of the training files and of the held-out files, in the order of the files' paths."""

    train: list[str]
    held_out: list[str]


def read_corpus() -> Corpus:
    """Read the standard library, split by a hash of each file's path relative to its root."""
    root = Path(sysconfig.get_path("stdlib"))
    corpus = Corpus([], [])
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(parts) or parts[0].startswith(SKIPPED_PREFIXES):
            continue
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).digest()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if digest in seen or not text.strip():
            continue
        seen.add(digest)
        (corpus.held_out if is_held_out(parts) else corpus.train).append(text)
    return corpus


def is_held_out(parts: tuple[str, ...]) -> bool:
    """Return whether the file at this relative path is kept from training."""
    digest = hashlib.sha256("/".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer. It has no post-processor: ``encode`` adds no specials."""
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
    """Return the token ids of ``BOS`` and ``EOS``."""
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    assert bos is not None and eos is not None
    return bos, eos


def encode(
    tokenizer: Tokenizer, texts: list[str], *, anywhere: float = 0.0, after_space: float = 0.0
) -> list[Tokens]:
    """Encode each document as bos + tokens + eos.

    A prompt may end after a space or inside a word, where an uncut text has no token boundary. The
    model sees such boundaries in training because the text is cut at any character with
    probability ``anywhere``, and at each end of whitespace with probability ``after_space``. The
    pieces are tokenized separately.
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


class WindowPacker:
    """Packs documents into batches of windows. Batch ``i`` depends on the seed and ``i`` only."""

    def __init__(self, docs: list[Tokens], length: int, batch: int, seed: int) -> None:
        self.docs, self.length, self.batch, self.seed = docs, length, batch, seed
        total = sum(len(d) for d in docs)
        self.batches_per_epoch = (total - length) // (length + 1) // batch
        self.loaded_epoch = -1
        self.windows: Tokens = np.zeros((0, length + 1), dtype=np.int64)

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return batch ``index``: tokens and next tokens, both [batch, length]."""
        epoch, offset = divmod(index, self.batches_per_epoch)
        if epoch != self.loaded_epoch:
            self.windows = self._shuffled_windows(epoch)
            self.loaded_epoch = epoch
        rows = torch.from_numpy(self.windows[offset * self.batch : (offset + 1) * self.batch])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _shuffled_windows(self, epoch: int) -> Tokens:
        """Shuffle and join the documents, cut them into windows, and shuffle the windows."""
        rng = np.random.default_rng([self.seed, epoch])
        stream = np.concatenate([self.docs[i] for i in rng.permutation(len(self.docs))])
        stream = stream[rng.integers(self.length) :]
        count = self.batches_per_epoch * self.batch
        windows = stream[: count * (self.length + 1)].reshape(count, self.length + 1)
        return windows[rng.permutation(count)]
