"""Train Baton's demo pair: a small Llama-architecture target and a ~10x smaller draft for it.

The text is the Python standard library of the interpreter that runs this script. Both models
are trained together in one loop on a CPU: the target on next-token cross-entropy, the draft on
the target's predictions (distillation), so the draft costs no extra target forward passes.

    python -m engine.demo.training.train --out engine/demo

The script needs torch, tokenizers, safetensors and numpy. Checkpoints are kept in ``--work``; the
same command resumes from there after an interruption. See ``target/README.md`` for the results.
"""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.demo.training.corpus import Tokens, encode, read_corpus, train_tokenizer
from engine.demo.training.evaluate import HeldOutResults, complete, evaluate, quick_loss
from engine.demo.training.export import export, load, write_json
from engine.demo.training.model_card import (
    CompletionSample,
    TrainingFacts,
    model_card,
    results_table,
)
from engine.demo.training.networks import DRAFT, TARGET, Llama, PairRecipe, parameter_count
from engine.demo.training.train_loop import PairBatches, PairTrainer, train

SHAPES = {"target": TARGET, "draft": DRAFT}
# Prompts of the cards' sample completions, with their temperatures.
PROMPTS = (("class Foo:\n    def ", 0.0), ("class Foo:", 0.8), ("import ", 0.0))


class PairTrainingOptions(argparse.Namespace):
    """Command-line options."""

    out: Path
    work: Path
    steps: int
    long_steps: int
    threads: int
    save_every: int
    export_every: int
    compile: bool
    evaluate: bool


def parse_options() -> PairTrainingOptions:
    """Parse the command line; the defaults come from the recipe."""
    recipe = PairRecipe()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default="engine/demo", help="where target/ and draft/ go"
    )
    parser.add_argument("--work", type=Path, default="build/demo", help="checkpoint folder")
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
    return parser.parse_args(namespace=PairTrainingOptions())


def encode_and_count(
    name: str, tokenizer: Tokenizer, texts: list[str], anywhere: float = 0.0
) -> list[Tokens]:
    """Encode the texts, and print the number of files, characters and tokens."""
    docs = encode(tokenizer, texts, anywhere=anywhere)
    size, count = sum(map(len, texts)), sum(map(len, docs))
    print(f"{name}: {len(docs)} files, {size} characters, {count} tokens", flush=True)
    return docs


def train_pair(
    trainer: PairTrainer,
    batches: PairBatches,
    tokenizer: Tokenizer,
    held_out: list[Tokens],
    options: PairTrainingOptions,
) -> float:
    """Train, export and print the held-out loss from time to time; return the seconds spent."""
    recipe, seconds = trainer.recipe, 0.0
    models = {"target": trainer.target, "draft": trainer.draft}
    progress = train(trainer, batches, compiled=options.compile, save_every=options.save_every)
    for step, elapsed in progress:
        seconds = elapsed
        if step % options.export_every == 0 or step == recipe.steps:
            note = f"# Unfinished\n\nAfter {step} of {recipe.steps} training steps.\n"
            for name, model in models.items():
                export(model, tokenizer, options.out / name, note)
            losses = [
                quick_loss(load(options.out / name, shape), held_out)
                for name, shape in SHAPES.items()
            ]
            print(f"held-out loss: target {losses[0]:.3f} draft {losses[1]:.3f}", flush=True)
    return seconds


def write_cards(
    models: dict[str, Llama],
    tokenizer: Tokenizer,
    facts: TrainingFacts,
    results: HeldOutResults,
    out: Path,
) -> None:
    """Write the card of each model and print its sample completions."""
    for name, model in models.items():
        samples = [CompletionSample(p, t, complete(model, tokenizer, p, t)) for p, t in PROMPTS]
        card = model_card(name, model.shape, facts, results, samples)
        (out / name / "README.md").write_text(card, encoding="utf-8")
        for sample in samples:
            print(f"--- {name}, T={sample.temperature}\n{sample.text}")


def main() -> None:
    """Train, export and evaluate the pair, and write its cards; or only evaluate it."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    recipe = PairRecipe(steps=options.steps, long_steps=options.long_steps)
    corpus = read_corpus()
    if options.evaluate:
        tokenizer = Tokenizer.from_file(str(options.out / "target" / "tokenizer.json"))
    else:
        options.work.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(corpus.train)
    train_docs = encode_and_count("train", tokenizer, corpus.train, recipe.cut_anywhere)
    held_out = encode_and_count("held out", tokenizer, corpus.held_out)
    target, draft = Llama(TARGET, recipe.seed), Llama(DRAFT, recipe.seed + 1)
    parameters = {"target": parameter_count(target), "draft": parameter_count(draft)}
    print(f"parameters: {parameters}", flush=True)

    seconds = 0.0
    if not options.evaluate:
        cuts = {"anywhere": recipe.cut_anywhere, "after_space": recipe.long_cut_after_space}
        long_docs = encode(tokenizer, corpus.train, **cuts)
        trainer = PairTrainer(target, draft, recipe, options.work / "checkpoint.pt")
        batches = PairBatches(train_docs, long_docs, recipe)
        seconds = train_pair(trainer, batches, tokenizer, held_out, options)

    models = {name: load(options.out / name, shape) for name, shape in SHAPES.items()}
    results = evaluate(models["target"], models["draft"], held_out)
    print(results_table(results))
    if options.evaluate:
        return
    train_characters, train_tokens = sum(map(len, corpus.train)), sum(map(len, train_docs))
    facts = TrainingFacts(
        recipe, len(train_docs), train_characters, train_tokens, parameters, seconds
    )
    write_cards(models, tokenizer, facts, results, options.out)
    write_json(options.work / "results.json", asdict(results))


if __name__ == "__main__":
    main()
