"""Train Baton's demo pair: a small Llama-architecture target and a ~10x smaller draft for it.

The text is the Python standard library of the interpreter that runs this script. Both models
are trained together in one loop on a CPU: the target on next-token cross-entropy, the draft on
the target's own predictions (distillation), so the draft costs no extra target forward passes.

    python -m engine.demo.train --out engine/demo

Needs torch, tokenizers, safetensors and numpy. Progress is kept in ``--work``; running the same
command again after an interruption resumes from there. See ``target/README.md`` for the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import shutil
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

BOS, EOS = "<|bos|>", "<|eos|>"
VOCAB_SIZE = 4096
MAX_LEN = 4096
WEIGHTS = "model.safetensors"
HELD_OUT_PERCENT = 3
# Folders whose Python files are left out: tests, and tables of data that are code in name only.
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")  # build settings of the local interpreter
BUCKETS = ((0, 128), (128, 512), (512, 1024), (1024, 2048), (2048, 4096))
PROMPTS = (
    ("class Foo:\n    def ", 0.0),
    ("class Foo:", 0.8),
    ("import ", 0.0),
)


# --------------------------------------------------------------------------- corpus


@dataclass(frozen=True)
class Corpus:
    train: list[str]
    held_out: list[str]


def read_corpus() -> Corpus:
    """Read the standard library, split by a hash of each file's path relative to its root."""
    root = Path(sysconfig.get_path("stdlib"))
    train: list[str] = []
    held_out: list[str] = []
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
        bucket = int.from_bytes(hashlib.sha256("/".join(parts).encode()).digest()[:8], "big")
        (held_out if bucket % 100 < HELD_OUT_PERCENT else train).append(text)
    return Corpus(train, held_out)


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
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    assert bos is not None and eos is not None
    return bos, eos


def encode(
    tokenizer: Tokenizer, texts: list[str], *, anywhere: float = 0.0, after_space: float = 0.0
) -> list[np.ndarray]:
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


class Packer:
    """Batches of packed windows. Batch ``i`` depends on the seed and ``i`` only."""

    def __init__(self, docs: list[np.ndarray], length: int, batch: int, seed: int) -> None:
        self.docs, self.length, self.batch, self.seed = docs, length, batch, seed
        total = sum(len(d) for d in docs)
        self.per_pass = (total - length) // (length + 1) // batch
        self.loaded_pass = -1
        self.windows = np.zeros((0, length + 1), dtype=np.int64)

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        which, offset = divmod(index, self.per_pass)
        if which != self.loaded_pass:
            rng = np.random.default_rng([self.seed, which])
            stream = np.concatenate([self.docs[i] for i in rng.permutation(len(self.docs))])
            stream = stream[rng.integers(self.length) :]
            count = self.per_pass * self.batch
            windows = stream[: count * (self.length + 1)].reshape(count, self.length + 1)
            self.windows = windows[rng.permutation(count)]
            self.loaded_pass = which
        rows = torch.from_numpy(self.windows[offset * self.batch : (offset + 1) * self.batch])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# --------------------------------------------------------------------------- model


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float = 10000.0
    eps: float = 1e-5


TARGET = Shape(hidden=256, layers=6, heads=4, kv_heads=2, head_dim=64, intermediate=704)
DRAFT = Shape(hidden=96, layers=2, heads=2, kv_heads=1, head_dim=64, intermediate=256)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = s.heads, s.kv_heads, s.head_dim
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(batch, length, heads, self.head_dim).transpose(1, 2)

        def rotate(y: Tensor) -> Tensor:
            a, b = y.float().chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(y.dtype)

        q = rotate(split(self.q_proj(x), self.heads))
        k = rotate(split(self.k_proj(x), self.kv_heads))
        v = split(self.v_proj(x), self.kv_heads)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class Mlp(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.down_proj = nn.Linear(s.intermediate, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(s.hidden, s.eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = Norm(s.hidden, s.eps)
        self.mlp = Mlp(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = Norm(s.hidden, s.eps)


class Llama(nn.Module):
    """Llama with tied embeddings; parameter names are those of a Hugging Face checkpoint."""

    cos: Tensor
    sin: Tensor

    def __init__(self, s: Shape, seed: int) -> None:
        super().__init__()
        self.shape = s
        self.model = Body(s)
        inverse = s.rope_theta ** -(torch.arange(0, s.head_dim, 2) / s.head_dim)
        angles = torch.arange(MAX_LEN)[:, None] * inverse
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                scale = 1.0
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    scale = 1 / math.sqrt(2 * s.layers)
                nn.init.normal_(p, std=0.02 * scale, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# --------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Recipe:
    steps: int = 1600
    long_steps: int = 215  # the last steps, on windows of MAX_LEN tokens
    batch_tokens: int = 8192
    window: int = 512
    warmup: int = 60
    decay_steps: int = 485  # the last steps on short windows, falling from lr to long_lr
    lr: float = 3e-3
    long_lr: float = 5.75e-4
    weight_decay: float = 0.1
    cut_anywhere: float = 1 / 300  # see encode()
    long_cut_after_space: float = 1 / 12
    seed: int = 1


def make_optimizers(model: Llama, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(
        matrices,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(others, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]


def learning_rate(step: int, recipe: Recipe) -> float:
    """Warm up, hold, fall linearly to ``long_lr``; on the long windows, fall linearly to zero."""
    left = recipe.steps - step
    if left <= recipe.long_steps:
        return recipe.long_lr * left / recipe.long_steps
    warm = recipe.lr * (step + 1) / recipe.warmup
    fallen = min(1.0, (left - recipe.long_steps) / recipe.decay_steps)
    return min(warm, recipe.long_lr + (recipe.lr - recipe.long_lr) * fallen)


def joint_loss(target: Llama, draft: Llama, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The target's cross-entropy with the text, and the draft's with the target."""
    target_logits = target(x).flatten(0, 1).float()
    target_loss = F.cross_entropy(target_logits, y.flatten())
    teacher = target_logits.detach().softmax(-1)
    student = F.log_softmax(draft(x).flatten(0, 1).float(), -1)
    return target_loss, -(teacher * student).sum(-1).mean()


def train(
    target: Llama,
    draft: Llama,
    docs: list[np.ndarray],
    long_docs: list[np.ndarray],
    recipe: Recipe,
    args: argparse.Namespace,
) -> Iterator[tuple[int, float]]:
    """Train both models in place; yields (steps done, seconds so far) after every step."""
    short = Packer(docs, recipe.window, recipe.batch_tokens // recipe.window, recipe.seed)
    long = Packer(long_docs, MAX_LEN, max(1, recipe.batch_tokens // MAX_LEN), recipe.seed + 1)
    pair = (target, draft)
    optimizers = [o for m in pair for o in make_optimizers(m, recipe)]
    parts: list[nn.Module | torch.optim.Optimizer] = [*pair, *optimizers]
    checkpoint = Path(args.work) / "checkpoint.pt"
    done, seconds = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        if state["recipe"] != asdict(recipe):
            raise SystemExit(f"{checkpoint} was made with another recipe; remove it to restart")
        for part, saved in zip(parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        done, seconds = state["step"], state["seconds"]
        print(f"resumed at step {done}", flush=True)
    loss_fn = torch.compile(joint_loss, dynamic=False) if args.compile else joint_loss
    clock = time.monotonic() - seconds
    for step in range(done, recipe.steps):
        into_long = step - (recipe.steps - recipe.long_steps)
        x, y = short(step) if into_long < 0 else long(into_long)
        with torch.autocast("cpu", torch.bfloat16):
            target_loss, draft_loss = loss_fn(target, draft, x, y)
        torch.autograd.backward(target_loss + draft_loss)
        for model in pair:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, recipe)
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.monotonic() - clock
        if step < 10 or (step + 1) % 20 == 0:
            print(
                f"step {step + 1}/{recipe.steps} window {x.shape[1]} "
                f"target {target_loss.item():.3f} draft-on-target {draft_loss.item():.3f} "
                f"lr {learning_rate(step, recipe):.2e} {seconds:.0f}s",
                flush=True,
            )
        if (step + 1) % args.save_every == 0 or step + 1 == recipe.steps:
            state = {
                "recipe": asdict(recipe),
                "step": step + 1,
                "seconds": seconds,
                "parts": [part.state_dict() for part in parts],
            }
            partial = checkpoint.with_suffix(".partial")
            torch.save(state, partial)
            partial.replace(checkpoint)
        yield step + 1, seconds
    if done >= recipe.steps:
        yield done, seconds


# --------------------------------------------------------------------------- evaluation


def load(folder: Path, shape: Shape) -> Llama:
    """An exported model: its bfloat16 weights, held in float32."""
    model = Llama(shape, seed=0)
    model.load_state_dict({k: v.float() for k, v in load_file(folder / WEIGHTS).items()})
    return model.eval()


@torch.no_grad()
def quick_loss(model: Llama, docs: list[np.ndarray]) -> float:
    """Held-out loss on a small fixed sample, to watch progress by."""
    stream = torch.from_numpy(np.concatenate(docs))
    rows = stream[: len(stream) // 513 * 513].view(-1, 513)
    rows = rows[:: max(1, len(rows) // 32)][:32]
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).item()


@torch.no_grad()
def evaluate(target: Llama, draft: Llama, docs: list[np.ndarray]) -> dict[str, Any]:
    """Perplexities and draft agreement on held-out files.

    The figures by context length come from the same windows in every row: all full windows of
    ``MAX_LEN`` predicted tokens, cut one after another from each file's start. The overall
    figures also take in what is left at the files' ends, and the files shorter than a window.
    """
    keys = ("tokens", "target", "draft", "agree", "accept")
    rows = {b: dict.fromkeys(keys, 0.0) for b in BUCKETS}
    overall = dict.fromkeys(keys, 0.0)
    characters = 0
    windows = 0
    for doc in docs:
        characters += len(doc) - 2
        for start in range(0, len(doc) - 1, MAX_LEN):
            piece = torch.from_numpy(doc[start : start + MAX_LEN + 1])
            full = len(piece) == MAX_LEN + 1
            windows += full
            y = piece[1:, None]
            t = target(piece[None, :-1])[0].log_softmax(-1)
            d = draft(piece[None, :-1])[0].log_softmax(-1)
            measures = {
                "tokens": torch.ones(len(y)),
                "target": -t.gather(1, y)[:, 0],
                "draft": -d.gather(1, y)[:, 0],
                "agree": (t.argmax(-1) == d.argmax(-1)).float(),
                "accept": torch.minimum(t, d).exp().sum(-1),
            }
            for key, values in measures.items():
                overall[key] += values.sum().item()
                if full:
                    for low, high in BUCKETS:
                        rows[low, high][key] += values[low:high].sum().item()

    def finish(sums: dict[str, float]) -> dict[str, float]:
        n = max(1.0, sums["tokens"])
        return {
            "tokens": int(sums["tokens"]),
            "target_perplexity": math.exp(sums["target"] / n),
            "draft_perplexity": math.exp(sums["draft"] / n),
            "greedy_agreement": sums["agree"] / n,
            "expected_acceptance": sums["accept"] / n,
        }

    return {
        "files": len(docs),
        "full_windows": windows,
        "overall": finish(overall),
        "by_position": {f"{low}-{high - 1}": finish(rows[low, high]) for low, high in BUCKETS},
    }


@torch.no_grad()
def complete(
    model: Llama, tokenizer: Tokenizer, prompt: str, temperature: float, tokens: int = 120
) -> str:
    """Complete a prompt, as it is; greedy when the temperature is zero."""
    generator = torch.Generator().manual_seed(0)
    ids = tokenizer.encode(prompt).ids
    for _ in range(tokens):
        logits = model(torch.tensor([ids]))[0, -1]
        if temperature:
            p = (logits / temperature).softmax(-1)
            token = int(torch.multinomial(p, 1, generator=generator))
        else:
            token = int(logits.argmax())
        if token == tokenizer.token_to_id(EOS):
            break
        ids.append(token)
    return tokenizer.decode(ids)


# --------------------------------------------------------------------------- export


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export(model: Llama, tokenizer: Tokenizer, folder: Path, card: str) -> None:
    """Write a Hugging Face folder, replacing each file at once."""
    s = model.shape
    bos, eos = special_ids(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        new = Path(temporary)
        weights = {k: v.detach().bfloat16().contiguous() for k, v in model.state_dict().items()}
        save_file(weights, new / WEIGHTS, metadata={"format": "pt"})
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": s.hidden,
            "intermediate_size": s.intermediate,
            "num_hidden_layers": s.layers,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.kv_heads,
            "head_dim": s.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": MAX_LEN,
            "rms_norm_eps": s.eps,
            "rope_theta": s.rope_theta,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "torch_dtype": "bfloat16",
        }
        write_json(new / "config.json", config)
        write_json(new / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos})
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "model_max_length": MAX_LEN,
            "clean_up_tokenization_spaces": False,
        }
        write_json(new / "tokenizer_config.json", tokenizer_config)
        tokenizer.save(str(new / "tokenizer.json"))
        (new / "README.md").write_text(card, encoding="utf-8")
        for path in sorted(new.iterdir()):
            path.chmod(0o644)
            path.replace(folder / path.name)


# --------------------------------------------------------------------------- model card


def results_table(results: dict[str, Any]) -> str:
    lines = [
        "| position in the context | tokens | target perplexity | draft perplexity "
        "| greedy agreement | expected acceptance |",
        "|---|---|---|---|---|---|",
    ]
    rows = [*results["by_position"].items(), ("all held-out tokens", results["overall"])]
    lines += [
        f"| {name} | {row['tokens']} | {row['target_perplexity']:.2f} "
        f"| {row['draft_perplexity']:.2f} | {row['greedy_agreement']:.1%} "
        f"| {row['expected_acceptance']:.1%} |"
        for name, row in rows
    ]
    return "\n".join(lines)


def model_card(
    name: str,
    s: Shape,
    facts: dict[str, Any],
    results: dict[str, Any],
    samples: list[tuple[str, float, str]],
) -> str:
    recipe: Recipe = facts["recipe"]
    passes = recipe.steps * recipe.batch_tokens / facts["train_tokens"]
    counts = facts["parameters"]
    if name == "target":
        role = "the target, the model that the demo serves"
        objective = "next-token cross-entropy"
    else:
        role = "the draft, which proposes tokens for the target to check (speculative decoding)"
        objective = "cross-entropy with the target's predictions (distillation)"
    blocks = [
        "---\nlicense: other\nlicense_name: psf-2.0\npipeline_tag: text-generation\n---",
        f"# Baton demo {name}",
        f"""One of a pair of very small models that complete Python, made so that Baton can be run,
        tested and measured on any computer without downloading a model. This is {role}. The other
        one is in the folder next to it and has the same tokenizer.""",
        "## Architecture",
        f"""`LlamaForCausalLM`, {counts[name]:,} parameters in bfloat16: {s.layers} layers, hidden
        size {s.hidden}, {s.heads} query and {s.kv_heads} key-value heads of size {s.head_dim},
        intermediate size {s.intermediate}, tied embeddings, {VOCAB_SIZE} tokens, {MAX_LEN}
        positions, RoPE theta {s.rope_theta:.0f}. The target has {counts["target"]:,} parameters,
        the draft {counts["draft"]:,}.""",
        f"""The tokenizer is a byte-level BPE: every text encodes and decodes back byte for byte.
        `encode` adds no special tokens. In training each file began with `{BOS}` and ended with
        `{EOS}`, so put `{BOS}` in front of a prompt that is the start of a file; without it a
        prompt reads as text from the middle of one. There is no chat template.""",
        "## Data",
        f"""The Python files of the standard library of CPython {platform.python_version()}, without
        its tests, `encodings` and `pydoc_data`: {facts["train_files"]} files,
        {facts["train_characters"]:,} characters, {facts["train_tokens"]:,} tokens. Another
        {results["files"]} files, with {results["overall"]["tokens"]:,} tokens, were held out by a
        hash of their paths; the tokenizer did not see them either. There was no other text. The
        training text was cut at about one character in {1 / recipe.cut_anywhere:.0f}, and on the
        long windows also at one end of whitespace in {1 / recipe.long_cut_after_space:.0f}, and
        tokenized piece by piece, so that a prompt may end after a space or inside a word. The
        held-out text was not cut.""",
        "## Training",
        f"""Both models were trained together from random weights, this one on {objective}:
        {recipe.steps} steps of {recipe.batch_tokens} tokens ({passes:.1f} passes over the data) in
        windows of {recipe.window} tokens packed from whole files in random order, the last
        {recipe.long_steps} steps in windows of {MAX_LEN}. Muon for the layers' matrices and AdamW
        for the rest; peak rate {recipe.lr:g}, reached over {recipe.warmup} steps, linear to
        {recipe.long_lr:g} over the last {recipe.decay_steps} steps on short windows and linear to
        zero on the long ones; weight decay {recipe.weight_decay:g} on the matrices; gradients
        clipped at 1. The pair took {facts["seconds"] / 60:.0f} minutes
        on two shared CPU cores in bfloat16 autocast.""",
        "    python -m engine.demo.train --out engine/demo",
        "## Held-out results",
        "Measured on these exported weights, computed in float32, with the same Python version:",
        "    python -m engine.demo.train --out engine/demo --evaluate",
        results_table(results),
        f"""The rows by position all come from the same {results["full_windows"]} windows of
        {MAX_LEN} predicted tokens, cut one after another from each file's start; the last row adds
        what is left of the files. Greedy agreement is how often both models have the same most
        likely token. Expected acceptance is the sum over tokens of the lower of their two
        probabilities: how often speculative sampling at temperature 1 keeps a proposed token.""",
        "## Completions",
        f"Each prompt is given as it is, without `{BOS}`, and completed with 120 tokens, seed 0.",
    ]
    for prompt, temperature, text in samples:
        how = f"at temperature {temperature}" if temperature else "greedy"
        blocks += [f"Prompt `{prompt!r}`, {how}:", f"```python\n{text.rstrip()}\n```"]
    blocks += [
        "## Limits",
        f"""It writes text that looks like the Python standard library, and that is all: the code is
        usually wrong, names are made up, and greedy output tends to repeat itself. It follows no
        instructions. A prompt that ends in a space, such as `import `, is completed worse than one
        that does not, because tokens begin with their space. It can reproduce passages of the
        standard library word for word. Positions past {MAX_LEN} were never trained. Use it to
        exercise a serving system, not to write code.""",
        "## Licence",
        """Made from the Python standard library, copyright Python Software Foundation, under the
        PSF License Version 2 (some of its modules carry notices of their own). These weights are
        offered under the same terms.""",
    ]
    return "\n\n".join(wrapped(block) for block in blocks) + "\n"


def wrapped(block: str) -> str:
    """Fill a paragraph's lines; tables, code, headings and front matter stay as they are."""
    if block.startswith(("---", "#", "|", "    ", "```", "Prompt ")):
        return block
    return textwrap.fill(" ".join(block.split()), 100, break_on_hyphens=False)


def main() -> None:
    recipe = Recipe()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="engine/demo", help="where target/ and draft/ go")
    parser.add_argument("--work", default="build/demo", help="checkpoint folder")
    parser.add_argument("--steps", type=int, default=recipe.steps)
    parser.add_argument("--long-steps", type=int, default=recipe.long_steps)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--export-every", type=int, default=400, help="steps between exports")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=shutil.which(os.environ.get("CXX", "g++")) is not None,
        help="torch.compile the loss (default: when a C++ compiler is found)",
    )
    parser.add_argument("--evaluate", action="store_true", help="only evaluate what is in --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recipe = Recipe(steps=args.steps, long_steps=args.long_steps)
    out, work = Path(args.out), Path(args.work)

    corpus = read_corpus()
    if args.evaluate:
        tokenizer = Tokenizer.from_file(str(out / "target" / "tokenizer.json"))
    else:
        work.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(corpus.train)
    train_docs = encode(tokenizer, corpus.train, anywhere=recipe.cut_anywhere)
    held_out_docs = encode(tokenizer, corpus.held_out)
    for name, texts, docs in (
        ("train", corpus.train, train_docs),
        ("held out", corpus.held_out, held_out_docs),
    ):
        size, count = sum(map(len, texts)), sum(map(len, docs))
        print(f"{name}: {len(docs)} files, {size} characters, {count} tokens", flush=True)

    facts: dict[str, Any] = {
        "recipe": recipe,
        "train_files": len(train_docs),
        "train_characters": sum(map(len, corpus.train)),
        "train_tokens": sum(map(len, train_docs)),
    }
    target, draft = Llama(TARGET, recipe.seed), Llama(DRAFT, recipe.seed + 1)
    facts["parameters"] = {"target": parameter_count(target), "draft": parameter_count(draft)}
    print(f"parameters: {facts['parameters']}", flush=True)
    if not args.evaluate:
        long_docs = encode(
            tokenizer,
            corpus.train,
            anywhere=recipe.cut_anywhere,
            after_space=recipe.long_cut_after_space,
        )
        for step, seconds in train(target, draft, train_docs, long_docs, recipe, args):
            facts["seconds"] = seconds
            if step % args.export_every == 0 or step == recipe.steps:
                note = f"# Unfinished\n\nAfter {step} of {recipe.steps} training steps.\n"
                export(target, tokenizer, out / "target", note)
                export(draft, tokenizer, out / "draft", note)
                losses = [
                    quick_loss(load(out / name, shape), held_out_docs)
                    for name, shape in (("target", TARGET), ("draft", DRAFT))
                ]
                print(f"held-out loss: target {losses[0]:.3f} draft {losses[1]:.3f}", flush=True)

    target, draft = load(out / "target", TARGET), load(out / "draft", DRAFT)
    results = evaluate(target, draft, held_out_docs)
    print(results_table(results))
    if args.evaluate:
        return
    for name, model in (("target", target), ("draft", draft)):
        samples = [(p, t, complete(model, tokenizer, p, t)) for p, t in PROMPTS]
        card = model_card(name, model.shape, facts, results, samples)
        (out / name / "README.md").write_text(card, encoding="utf-8")
        for _, temperature, text in samples:
            print(f"--- {name}, T={temperature}\n{text}")
    write_json(work / "results.json", results)


if __name__ == "__main__":
    main()
