"""Train Medusa or EAGLE heads on Baton's demo target.

    python -m engine.demo.training.train_heads medusa
    python -m engine.demo.training.train_heads eagle

The heads learn to say what the target says further on, on the text that the target was trained on
(the Python standard library of the interpreter that runs this script) and on the target's own
continuations of pieces of it. The target stays as it is. Progress is kept in ``--work``; the same
command goes on from there after an interruption. ``--evaluate`` measures what is in ``--out``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from engine.demo.training.corpus import Tokens, encode, read_corpus
from engine.demo.training.export import WEIGHTS, load, model_config, write_json
from engine.demo.training.heads_card import Figures, head_card, table
from engine.demo.training.heads_evaluate import (
    Continued,
    Foretell,
    Measured,
    agreement,
    continued,
    cut_prompts,
    draft_foretells,
    foretells,
    measure,
    met_ranks,
    prior_of,
)
from engine.demo.training.heads_networks import MedusaHeads
from engine.demo.training.heads_recipe import (
    RECIPES,
    HeadBatches,
    HeadRecipe,
    HeadTrainer,
    make_head,
    train_head,
)
from engine.demo.training.networks import DRAFT, TARGET, Llama, Recipe, parameter_count
from engine.speculation.proposers.draft_tree import TreePrior

# MERGED engine.demo.heads_export
# Folders of trained heads, in the published layouts.


def export_head(
    head: nn.Module, target: Llama, recipe: HeadRecipe, prior: TreePrior, folder: Path
) -> None:
    """Write weights in bfloat16, and the config. ``prior``: see engine/speculation/heads_tree."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.detach().bfloat16().contiguous() for k, v in head.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    s = target.shape
    if isinstance(head, MedusaHeads):
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
    """An exported head: its bfloat16 weights, held in float32."""
    head = make_head(recipe, target)
    weights = load_file(folder / WEIGHTS)
    head.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return head.eval()


TEMPERATURES = (0.0, 0.8, 1.0)
"""Of the target's own text."""
LOOKED_AT = (0.0, 0.8)
"""Temperatures that trees are made for."""


class Options(argparse.Namespace):
    """The command line."""

    kind: str
    out: Path
    work: Path
    steps: int | None
    pieces: int
    threads: int
    evaluate: bool


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; the defaults are those of the recipes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, default="engine/demo", help="holds target/ and draft/")
    parser.add_argument("--work", type=Path, default="build/heads", help="checkpoint folder")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--pieces", type=int, default=48, help="to measure on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--evaluate", action="store_true", help="only measure what is in --out")
    return parser.parse_args(arguments, namespace=Options())


class Text:
    """The corpus, and what the target makes of it."""

    def __init__(self, out: Path, work: Path, recipe: HeadRecipe) -> None:
        self._folder, self._work, self._recipe = out / "target", work, recipe
        tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        corpus = read_corpus()
        self.docs = encode(tokenizer, corpus.train, anywhere=Recipe().cut_anywhere)
        self.held_out = encode(tokenizer, corpus.held_out)

    def own(self) -> list[Tokens]:
        """The target's continuations of pieces of the corpus; kept in a file for the next time."""
        kept, recipe = self._work / f"own-{self._recipe.own_prompts}.npz", self._recipe
        if not kept.exists():
            print("the target writes", flush=True)
            texts = self.pieces(
                self.docs, recipe.own_prompts, TEMPERATURES, recipe.own_tokens
            ).texts
            ends = np.cumsum([len(text) for text in texts])
            np.savez(kept, stream=np.concatenate(texts), ends=ends)
        with np.load(kept) as saved:
            return np.split(saved["stream"], saved["ends"][:-1])

    def pieces(
        self, docs: list[Tokens], count: int, temperatures: Sequence[float], tokens: int = 96
    ) -> Continued:
        """``count`` pieces of ``docs``, continued by the target."""
        prompts = cut_prompts(docs, count, self._recipe.seed)
        with torch.inference_mode():
            return continued(self._folder, prompts, temperatures, tokens)


def trained(trainer: HeadTrainer, text: Text) -> float:
    """Train to the end; the seconds it took."""
    recipe, spent = trainer.recipe, 0.0
    for done, parts, seconds in train_head(trainer, HeadBatches(text.docs, text.own(), recipe)):
        spent = seconds
        if done <= 5 or done % 20 == 0:
            shown = " ".join(f"{part:.3f}" for part in parts)
            print(f"step {done}/{recipe.steps}: {shown} ({seconds:.0f} s)", flush=True)
    return spent or trainer.restore()[1]


def learned_prior(foretell: Foretell, text: Text, pieces: int, *, spine_only: bool) -> TreePrior:
    """From continuations of the training text, at the temperatures that trees are made for."""
    ranks = [
        met_ranks(foretell, text.pieces(text.docs, pieces, [heat]), heat) for heat in LOOKED_AT
    ]
    return prior_of(torch.cat(ranks, 1), spine_only=spine_only)


def measured(head: nn.Module, target: Llama, draft: Llama, text: Text, options: Options) -> Figures:
    """On held-out text; the draft beside it."""
    spine_only = options.kind == "eagle"
    ours, theirs = foretells(head, target), draft_foretells(draft)
    prior = learned_prior(ours, text, options.pieces, spine_only=spine_only)
    draft_prior = [row[:1] for row in learned_prior(theirs, text, options.pieces, spine_only=True)]
    rows: list[Measured] = []
    draft_rows: list[Measured] = []
    for heat in TEMPERATURES:
        pieces = text.pieces(text.held_out, options.pieces, [heat])
        ranks = met_ranks(ours, pieces, heat)
        places = ranks.shape[1]
        rows.append(measure(ranks, prior, heat, spine_only=spine_only))
        ranks = met_ranks(theirs, pieces, heat)
        draft_rows.append(measure(ranks, draft_prior, heat, spine_only=True))
    return Figures(
        options.pieces,
        places,
        rows,
        draft_rows,
        agreement(ours, target, text.held_out, 1024),
        agreement(theirs, target, text.held_out, 1024)[0],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, export, measure and describe; or only measure."""
    options = parse_options(arguments)
    torch.set_num_threads(options.threads)
    recipe, folder = RECIPES[options.kind], options.out / options.kind
    if options.steps is not None:
        recipe = replace(recipe, steps=options.steps)
    options.work.mkdir(parents=True, exist_ok=True)
    text = Text(options.out, options.work, recipe)
    target, draft = load(options.out / "target", TARGET), load(options.out / "draft", DRAFT)
    trainer = HeadTrainer(target, recipe, options.work / f"{options.kind}.pt")
    seconds = 0.0
    if not options.evaluate:
        seconds = trained(trainer, text)
        foretell = foretells(trainer.head, target)
        spine_only = options.kind == "eagle"
        prior = learned_prior(foretell, text, options.pieces, spine_only=spine_only)
        export_head(trainer.head, target, recipe, prior, folder)
    head = load_head(target, recipe, folder)
    figures = measured(head, target, draft, text, options)
    print(table(figures))
    if not options.evaluate:
        card = head_card(recipe, parameter_count(head), seconds, figures)
        (folder / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
