"""Model cards of target and draft: one template, filled in from a training run."""

from __future__ import annotations

import platform
import textwrap
from dataclasses import asdict, dataclass
from string import Template

from engine.demo.training.corpus import BOS, EOS, VOCAB_SIZE
from engine.demo.training.evaluate import HeldOutResults
from engine.demo.training.networks import MAX_LEN, LlamaShape, PairRecipe

ROLES = {
    "target": "the target, the model that the demo serves",
    "draft": "the draft, which proposes tokens for the target to check (speculative decoding)",
}
OBJECTIVES = {
    "target": "next-token cross-entropy",
    "draft": "cross-entropy with the target's predictions (distillation)",
}

# Blank lines separate blocks. Each block is substituted and, if it is a paragraph, wrapped.
CARD = """\
---
license: other
license_name: psf-2.0
pipeline_tag: text-generation
---

# Baton demo $name

One of a pair of very small models that complete Python, made so that Baton can be run, tested and
measured on any computer without downloading a model. This is $role. The other one is in the folder
next to it and has the same tokenizer.

## Architecture

`LlamaForCausalLM`, $parameters parameters in bfloat16: $layers layers, hidden size $hidden, $heads
query and $kv_heads key-value heads of size $head_dim, intermediate size $intermediate, tied
embeddings, $vocab_size tokens, $max_len positions, RoPE theta $rope_theta. The target has
$target_parameters parameters, the draft $draft_parameters.

The tokenizer is a byte-level BPE: every text encodes and decodes back byte for byte. `encode` adds
no special tokens. In training each file began with `$bos` and ended with `$eos`, so put `$bos` in
front of a prompt that is the start of a file; without it a prompt reads as text from the middle of
one. In the chat template's prompts a conversation is a Python file, in which others speak in
comments.

## Data

The Python files of the standard library of CPython $python, without its tests, `encodings` and
`pydoc_data`: $train_files files, $train_characters characters, $train_tokens tokens. Another
$held_out_files files, with $held_out_tokens tokens, were held out by a hash of their paths; the
tokenizer did not see them either. There was no other text. The training text was cut at about one
character in $cut_anywhere, and on the long windows also at one end of whitespace in $cut_space, and
tokenized piece by piece, so that a prompt may end after a space or inside a word. The held-out text
was not cut.

## Training

Both models were trained together from random weights, this one on $objective: $steps steps of
$batch_tokens tokens ($passes passes over the data) in windows of $window tokens packed from whole
files in random order, the last $long_steps steps in windows of $max_len. Muon for the layers'
matrices and AdamW for the rest; peak rate $lr, reached over $warmup steps, linear to $long_lr over
the last $decay_steps steps on short windows and linear to zero on the long ones; weight decay
$weight_decay on the matrices; gradients clipped at 1. The pair took $minutes minutes on two shared
CPU cores in bfloat16 autocast.

    python -m engine.demo.training.train --out engine/demo

## Held-out results

Measured on these exported weights, computed in float32, with the same Python version:

    python -m engine.demo.training.train --out engine/demo --evaluate

$table

The rows by position all come from the same $full_windows windows of $max_len predicted tokens, cut
one after another from each file's start; the last row adds what is left of the files. Greedy
agreement is how often both models have the same most likely token. Expected acceptance is the sum
over tokens of the lower of their two probabilities: how often speculative sampling at temperature 1
keeps a proposed token.

## Completions

Each prompt is given as it is, without `$bos`, and completed with 120 tokens, seed 0.

$samples

## Limits

It writes text that looks like the Python standard library, and that is all: the code is usually
wrong, names are made up, and greedy output tends to repeat itself. It follows no instructions. A
prompt that ends in a space, such as `import `, is completed worse than one that does not, because
tokens begin with their space. It can reproduce passages of the standard library word for word.
Positions past $max_len were never trained. Use it to exercise a serving system, not to write code.

## Licence

Made from the Python standard library, copyright Python Software Foundation, under the PSF License
Version 2 (some of its modules carry notices of their own). These weights are offered under the same
terms."""


@dataclass(frozen=True)
class TrainingFacts:
    """Facts of a training run that the cards of both models state."""

    recipe: PairRecipe
    train_files: int
    train_characters: int
    train_tokens: int
    parameters: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class CompletionSample:
    """One completion, prompt included; greedy if the temperature is zero."""

    prompt: str
    temperature: float
    text: str

    def __str__(self) -> str:
        how = f"at temperature {self.temperature}" if self.temperature else "greedy"
        return f"Prompt `{self.prompt!r}`, {how}:\n\n```python\n{self.text.rstrip()}\n```"


def model_card(
    name: str,
    shape: LlamaShape,
    facts: TrainingFacts,
    results: HeldOutResults,
    samples: list[CompletionSample],
) -> str:
    """Return the card of the model ``name``, "target" or "draft"."""
    values = {
        "name": name,
        "role": ROLES[name],
        "objective": OBJECTIVES[name],
        "bos": BOS,
        "eos": EOS,
        "python": platform.python_version(),
        "table": results_table(results),
        "samples": "\n\n".join(map(str, samples)),
        "parameters": f"{facts.parameters[name]:,}",
        "minutes": f"{facts.seconds / 60:.0f}",
        **{key: f"{value:g}" for key, value in asdict(shape).items()},
        "vocab_size": f"{VOCAB_SIZE}",
        "max_len": f"{MAX_LEN}",
        **{key: f"{value:g}" for key, value in asdict(facts.recipe).items()},
        "cut_anywhere": f"{1 / facts.recipe.cut_anywhere:.0f}",
        "cut_space": f"{1 / facts.recipe.long_cut_after_space:.0f}",
        **_data_values(facts, results),
    }
    blocks = [wrapped(Template(block).substitute(values)) for block in CARD.split("\n\n")]
    return "\n\n".join(blocks) + "\n"


def _data_values(facts: TrainingFacts, results: HeldOutResults) -> dict[str, str]:
    recipe = facts.recipe
    return {
        "target_parameters": f"{facts.parameters['target']:,}",
        "draft_parameters": f"{facts.parameters['draft']:,}",
        "train_files": f"{facts.train_files}",
        "train_characters": f"{facts.train_characters:,}",
        "train_tokens": f"{facts.train_tokens:,}",
        "held_out_files": f"{results.files}",
        "held_out_tokens": f"{results.overall.tokens:,}",
        "full_windows": f"{results.full_windows}",
        "passes": f"{recipe.steps * recipe.batch_tokens / facts.train_tokens:.1f}",
    }


def results_table(results: HeldOutResults) -> str:
    """Return the held-out metrics as a Markdown table."""
    lines = [
        "| position in the context | tokens | target perplexity | draft perplexity "
        "| greedy agreement | expected acceptance |",
        "|---|---|---|---|---|---|",
    ]
    rows = [*results.by_position.items(), ("all held-out tokens", results.overall)]
    lines += [
        f"| {name} | {row.tokens} | {row.target_perplexity:.2f} | {row.draft_perplexity:.2f} "
        f"| {row.greedy_agreement:.1%} | {row.expected_acceptance:.1%} |"
        for name, row in rows
    ]
    return "\n".join(lines)


def wrapped(block: str) -> str:
    """Wrap a paragraph; return tables, code, headings and front matter unchanged."""
    if block.startswith(("---", "#", "|", "    ", "```", "Prompt ")):
        return block
    return textwrap.fill(" ".join(block.split()), 100, break_on_hyphens=False)
