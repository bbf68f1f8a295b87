"""Train Medusa or EAGLE heads on Baton's demo target.

    python -m engine.demo.train_heads medusa
    python -m engine.demo.train_heads eagle

The heads learn to say what the target says further on, on the text that the target was trained on
(the Python standard library of the interpreter that runs this script) and on the target's own
continuations of pieces of it. The target stays as it is. Progress is kept in ``--work``; the same
command goes on from there after an interruption.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from engine.demo.corpus import read_corpus
from engine.demo.export import load
from engine.demo.heads_loop import HeadBatches, HeadTrainer, train_head
from engine.demo.heads_recipe import RECIPES, HeadRecipe
from engine.demo.heads_text import continued, cut_prompts
from engine.demo.models import TARGET
from engine.demo.recipe import Recipe
from engine.demo.tokenizer import Tokens, encode

TEMPERATURES = (0.0, 0.8, 1.0)
"""Of the target's own text."""


class Options(argparse.Namespace):
    """The command line."""

    kind: str
    out: Path
    work: Path
    steps: int | None
    threads: int


def parse_options() -> Options:
    """Read the command line; the defaults are those of the recipes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, default="engine/demo", help="holds target/")
    parser.add_argument("--work", type=Path, default="build/heads", help="checkpoint folder")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(namespace=Options())


def own_text(folder: Path, docs: list[Tokens], recipe: HeadRecipe, kept: Path) -> list[Tokens]:
    """The target's continuations of pieces of ``docs``; kept in a file for the next time."""
    if not kept.exists():
        print("the target writes", flush=True)
        prompts = cut_prompts(docs, recipe.own_prompts, recipe.seed)
        with torch.inference_mode():
            texts = continued(folder, prompts, TEMPERATURES, recipe.own_tokens).texts
        ends = np.cumsum([len(text) for text in texts])
        np.savez(kept, stream=np.concatenate(texts), ends=ends)
    with np.load(kept) as saved:
        return np.split(saved["stream"], saved["ends"][:-1])


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    recipe = RECIPES[options.kind]
    if options.steps is not None:
        recipe = replace(recipe, steps=options.steps)
    options.work.mkdir(parents=True, exist_ok=True)
    folder = options.out / "target"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    docs = encode(tokenizer, read_corpus().train, anywhere=Recipe().cut_anywhere)
    own = own_text(folder, docs, recipe, options.work / "own.npz")
    trainer = HeadTrainer(load(folder, TARGET), recipe, options.work / f"{options.kind}.pt")
    for done, parts, seconds in train_head(trainer, HeadBatches(docs, own, recipe)):
        if done <= 5 or done % 20 == 0:
            shown = " ".join(f"{part:.3f}" for part in parts)
            print(f"step {done}/{recipe.steps}: {shown} ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
