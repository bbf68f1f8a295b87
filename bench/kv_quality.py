"""What the KV precision fp8 costs in quality: the demo model on held-out Python.

    python -m bench.kv_quality [--windows N]

Full windows of the trained length (4096 tokens) from the held-out files are scored twice, token by
token, with exact KV and with KV on the fp8 grid. For each range of positions: perplexity of both,
and how often both find the same token the likeliest. Also the bytes of KV that a token takes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from bench.lib.report import ResultRow, finish
from cluster.models.locate import demo_path
from engine.batching.attention_metadata import AttentionMetadata, PackedBatch, chunk_attention
from engine.demo.training.corpus import encode, read_corpus
from engine.demo.training.evaluate import BUCKETS
from engine.demo.training.networks import MAX_LEN
from engine.kv_cache.kv_format import Codec, Precision, Storage
from engine.kv_cache.kv_pool import KVPool, make_pool
from engine.model.decoder import DecoderModel
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config
from protocol.block_keys import BLOCK_TOKENS

CHUNK = 512
CPU = torch.device("cpu")


def held_out_windows() -> Iterator[Tensor]:
    """Yield windows of MAX_LEN tokens and the token after them: [MAX_LEN + 1] int64."""
    tokenizer = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))
    for doc in encode(tokenizer, read_corpus().held_out):
        for start in range(0, len(doc) - MAX_LEN, MAX_LEN):
            yield torch.from_numpy(doc[start : start + MAX_LEN + 1])


@dataclass(frozen=True)
class Scores:
    """Scores of every token of a window but the first; both tensors are [MAX_LEN]."""

    loss: Tensor  # nats
    likeliest: Tensor  # the token that the model would have chosen


def score(model: DecoderModel, pool: KVPool, window: Tensor) -> Scores:
    """Feed the window [MAX_LEN + 1] in chunks, as a prefill does, and score all logits."""
    table = torch.arange(MAX_LEN // BLOCK_TOKENS)
    loss, likeliest = [], []
    for start in range(0, MAX_LEN, CHUNK):
        positions = torch.arange(start, start + CHUNK)
        chunk = chunk_attention(table, 0, start, CHUNK, 0, torch.empty(0, dtype=model.dtype))
        view = AttentionMetadata(0, (), (chunk,))
        batch = PackedBatch(window[start : start + CHUNK], positions, positions, {0: view}, None)
        logits = model.forward(batch, pool)
        following = window[start + 1 : start + CHUNK + 1]
        loss.append(F.cross_entropy(logits, following, reduction="none"))
        likeliest.append(logits.argmax(-1))
    return Scores(torch.cat(loss), torch.cat(likeliest))


@torch.inference_mode()
def compare(windows: list[Tensor]) -> list[ResultRow]:
    """Score the windows, each [MAX_LEN + 1], with exact KV, fp8 KV and KV stored as fp8 bytes."""
    config = load_config(demo_path())
    model = DecoderModel(config, load_weights(demo_path(), config, torch.float32, CPU), MAX_LEN)

    def scores(precision: Precision, storage: Storage) -> list[Scores]:
        format_ = config.kv_format(precision, storage, model.dtype.itemsize)
        pool = make_pool(format_, MAX_LEN // BLOCK_TOKENS, model.dtype, CPU)
        return [score(model, pool, window) for window in windows]

    exact, fp8, stored = scores("exact", "wide"), scores("fp8", "wide"), scores("fp8", "fp8")
    found = []
    for low, high in (*BUCKETS, (0, MAX_LEN)):
        at = slice(low, high)
        before, after = (
            math.exp(torch.cat([s.loss[at] for s in side]).mean().item()) for side in (exact, fp8)
        )
        same = torch.cat(
            [a.likeliest[at] == b.likeliest[at] for a, b in zip(exact, fp8, strict=True)]
        )
        name = f"positions {low} to {high - 1}"
        found += [
            ResultRow(f"{name}: perplexity", after, "", f"exact {before:.3f}", before / after),
            ResultRow(f"{name}: perplexity, change", 100 * (after / before - 1), "%"),
            ResultRow(f"{name}: same likeliest token", 100 * same.float().mean().item(), "%"),
        ]
    equal = all(torch.equal(a.loss, b.loss) for a, b in zip(fp8, stored, strict=True))
    found.append(ResultRow("a pool of bytes gives the very same scores", float(equal), ""))
    return found + sizes(model)


def sizes(model: DecoderModel) -> list[ResultRow]:
    """Report the KV bytes of a token on the wire, by codec and by the model's dtype."""
    rows = []
    for name, element_bytes in (("fp32", 4), ("bf16", 2)):
        format_ = model.config.kv_format("fp8", "wide", element_bytes)
        raw, packed = (
            format_.layers * format_.block_layer_bytes(codec) / BLOCK_TOKENS
            for codec in (Codec.RAW, Codec.FP8)
        )
        rows.append(
            ResultRow("KV of a token, fp8", packed, "bytes", f"raw {name} {raw:.0f}", raw / packed)
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, help="score only the first N windows")
    windows = list(held_out_windows())[: parser.parse_args().windows]
    print(f"{len(windows)} windows of {MAX_LEN} tokens")
    finish("kv_quality", compare(windows))


if __name__ == "__main__":
    main()
