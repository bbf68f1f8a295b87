"""Train Medusa or EAGLE heads on Baton's demo target.

    python -m engine.demo.training.train_heads medusa
    python -m engine.demo.training.train_heads eagle

The heads learn to predict what the target predicts further on, on the text that the target was
trained on (the Python standard library of the interpreter that runs this script) and on the
target's own continuations of pieces of it. The target is not changed. Checkpoints are kept in
``--work``; the same command resumes from there after an interruption. ``--evaluate`` measures the
heads in ``--out``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from engine.demo.training.corpus import Tokens, encode, read_corpus
from engine.demo.training.export import WEIGHTS, load, model_config, write_json
from engine.demo.training.heads_card import HeadResults, head_card, head_results_table
from engine.demo.training.heads_evaluate import (
    Continuations,
    DraftLogits,
    draft_model_logits,
    estimate_tree_prior,
    generate_continuations,
    greedy_agreement,
    head_logits,
    measure_draft,
    sample_prompts,
    target_token_ranks,
)
from engine.demo.training.heads_networks import TrainableMedusaHeads
from engine.demo.training.heads_recipe import (
    RECIPES,
    HeadBatches,
    HeadRecipe,
    HeadTrainer,
    make_head,
    train_head,
)
from engine.demo.training.networks import DRAFT, TARGET, Llama, PairRecipe, parameter_count
from engine.speculation.proposers.draft_tree import TreePrior

# Temperatures of the target's texts, and those that the tree prior is estimated at.
TEMPERATURES = (0.0, 0.8, 1.0)
PRIOR_TEMPERATURES = (0.0, 0.8)


def export_head(
    head: nn.Module, target: Llama, recipe: HeadRecipe, prior: TreePrior, folder: Path
) -> None:
    """Write a head folder in the published layout: bfloat16 weights, and the config with the prior.

    ``engine.speculation.proposers.draft_tree`` explains the prior.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.detach().bfloat16().contiguous() for k, v in head.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    s = target.shape
    if isinstance(head, TrainableMedusaHeads):
        config: dict[str, object] = {
            "model_type": "medusa",
            "medusa_num_heads": len(head),
            "medusa_num_layers": len(list(head[0].children())) - 1,
            "hidden_size": s.hidden,
            "vocab_size": target.model.embed_tokens.num_embeddings,
        }
    else:
        config = {
            **model_config(s, 0, 1),
            "num_hidden_layers": 1,
            "max_position_embeddings": max(recipe.segments),
            "tie_word_embeddings": False,
            "bias": False,
        }
    (folder / WEIGHTS).chmod(0o644)
    write_json(folder / "config.json", {**config, "tree_prior": prior})


def load_head(target: Llama, recipe: HeadRecipe, folder: Path) -> nn.Module:
    """Load an exported head, with its bfloat16 weights converted to float32."""
    head = make_head(recipe, target)
    weights = load_file(folder / WEIGHTS)
    head.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return head.eval()


class HeadTrainingOptions(argparse.Namespace):
    """Command-line options."""

    kind: str
    out: Path
    work: Path
    steps: int | None
    pieces: int
    threads: int
    evaluate: bool


def parse_options(arguments: Sequence[str] | None = None) -> HeadTrainingOptions:
    """Parse the command line; the defaults come from the recipes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, default="engine/demo", help="holds target/ and draft/")
    parser.add_argument("--work", type=Path, default="build/heads", help="checkpoint folder")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--pieces", type=int, default=48, help="number of texts to measure on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--evaluate", action="store_true", help="only measure what is in --out")
    return parser.parse_args(arguments, namespace=HeadTrainingOptions())


class HeadTrainingText:
    """The encoded corpus, and continuations of it that the target generates."""

    def __init__(self, out: Path, work: Path, recipe: HeadRecipe) -> None:
        self._folder, self._work, self._recipe = out / "target", work, recipe
        tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        corpus = read_corpus()
        self.docs = encode(tokenizer, corpus.train, anywhere=PairRecipe().cut_anywhere)
        self.held_out = encode(tokenizer, corpus.held_out)

    def load_or_generate(self) -> list[Tokens]:
        """Return the target's training texts; they are kept in a file for the next run."""
        cache, recipe = self._work / f"own-{self._recipe.own_prompts}.npz", self._recipe
        if not cache.exists():
            print("generating training text with the target", flush=True)
            texts = self.continuations(
                self.docs, recipe.own_prompts, TEMPERATURES, recipe.own_tokens
            ).texts
            ends = np.cumsum([len(text) for text in texts])
            np.savez(cache, stream=np.concatenate(texts), ends=ends)
        with np.load(cache) as saved:
            return np.split(saved["stream"], saved["ends"][:-1])

    def continuations(
        self, docs: list[Tokens], count: int, temperatures: Sequence[float], tokens: int = 96
    ) -> Continuations:
        """Let the target continue ``count`` pieces of ``docs``."""
        prompts = sample_prompts(docs, count, self._recipe.seed)
        with torch.inference_mode():
            return generate_continuations(self._folder, prompts, temperatures, tokens)


def run_training(trainer: HeadTrainer, text: HeadTrainingText) -> float:
    """Train to the last step; return the seconds that training took, resumed runs included."""
    recipe, spent = trainer.recipe, 0.0
    batches = HeadBatches(text.docs, text.load_or_generate(), recipe)
    for done, losses, seconds in train_head(trainer, batches):
        spent = seconds
        if done <= 5 or done % 20 == 0:
            shown = " ".join(f"{loss:.3f}" for loss in losses)
            print(f"step {done}/{recipe.steps}: {shown} ({seconds:.0f} s)", flush=True)
    return spent or trainer.checkpoint.restore()[1]


def learn_tree_prior(
    draft_logits: DraftLogits, text: HeadTrainingText, pieces: int, *, spine_only: bool
) -> TreePrior:
    """Estimate the prior on continuations of training text at ``PRIOR_TEMPERATURES``."""
    ranks = [
        target_token_ranks(draft_logits, text.continuations(text.docs, pieces, [t]), t)
        for t in PRIOR_TEMPERATURES
    ]
    return estimate_tree_prior(torch.cat(ranks, 1), spine_only=spine_only)


def measure_on_held_out(
    head: nn.Module,
    target: Llama,
    draft: Llama,
    text: HeadTrainingText,
    options: HeadTrainingOptions,
) -> HeadResults:
    """Measure the head and, for comparison, the demo draft on held-out text."""
    spine_only, pieces = options.kind == "eagle", options.pieces
    head_fn, draft_fn = head_logits(head, target), partial(draft_model_logits, draft)
    prior = learn_tree_prior(head_fn, text, pieces, spine_only=spine_only)
    draft_prior = [row[:1] for row in learn_tree_prior(draft_fn, text, pieces, spine_only=True)]
    rows, draft_rows = [], []
    for temperature in TEMPERATURES:
        texts = text.continuations(text.held_out, pieces, [temperature])
        ranks = target_token_ranks(head_fn, texts, temperature)
        places = ranks.shape[1]
        rows.append(measure_draft(ranks, prior, temperature, spine_only=spine_only))
        ranks = target_token_ranks(draft_fn, texts, temperature)
        draft_rows.append(measure_draft(ranks, draft_prior, temperature, spine_only=True))
    return HeadResults(
        pieces,
        places,
        rows,
        draft_rows,
        greedy_agreement(head_fn, target, text.held_out, 1024),
        greedy_agreement(draft_fn, target, text.held_out, 1024)[0],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, export and measure a head, and write its card; or only measure it."""
    options = parse_options(arguments)
    torch.set_num_threads(options.threads)
    recipe, folder = RECIPES[options.kind], options.out / options.kind
    if options.steps is not None:
        recipe = replace(recipe, steps=options.steps)
    options.work.mkdir(parents=True, exist_ok=True)
    text = HeadTrainingText(options.out, options.work, recipe)
    target, draft = load(options.out / "target", TARGET), load(options.out / "draft", DRAFT)
    trainer = HeadTrainer(target, recipe, options.work / f"{options.kind}.pt")
    seconds = 0.0
    if not options.evaluate:
        seconds = run_training(trainer, text)
        draft_logits = head_logits(trainer.head, target)
        spine_only = options.kind == "eagle"
        prior = learn_tree_prior(draft_logits, text, options.pieces, spine_only=spine_only)
        export_head(trainer.head, target, recipe, prior, folder)
    head = load_head(target, recipe, folder)
    results = measure_on_held_out(head, target, draft, text, options)
    print(head_results_table(results))
    if not options.evaluate:
        card = head_card(recipe, parameter_count(head), seconds, results)
        (folder / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
