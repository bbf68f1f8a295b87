"""Model cards of the Medusa and EAGLE heads: one template, filled in from a training run."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from string import Template

from engine.demo.training.heads_evaluate import DraftMeasurement
from engine.demo.training.heads_recipe import MEDUSA_BLOCKS, MEDUSA_HEADS, HeadRecipe
from engine.demo.training.model_card import wrapped

ABOUT = {
    "medusa": (
        "Medusa heads",
        f"{MEDUSA_HEADS} heads of {MEDUSA_BLOCKS} residual block and a reading of their own, in"
        " the layout of Medusa (Cai et al. 2024, arXiv 2401.10774): head i foretells, from what the"
        " target's own head sees at one token, the token i + 2 places further on.",
    ),
    "eagle": (
        "EAGLE head",
        "A head in the layout of EAGLE-1 and EAGLE-2 (Li et al. 2024, arXiv 2401.15077 and"
        " 2406.16858): one decoder layer over pairs of a token and the feature before it, which"
        " yields the next feature, for the target's own head to read.",
    ),
}
OBJECTIVES = {
    "medusa": "the cross-entropy of each head with the target's predictions of the same token",
    "eagle": "the cross-entropy with the target's predictions and half the smooth L1 distance of"
    " the features, over $unrolled steps of which each takes up what the one before foretold",
}

CARD = """\
---
license: other
license_name: psf-2.0
---

# Baton demo $title

$about It proposes tokens for the demo target, in the folder next to it, to check (speculative
decoding): text does not depend on it. $parameters parameters in bfloat16.

`tree_prior` in config.json tells by depth how often each rank was met on the target's own
continuations of training files, at temperatures 0 and 0.8: trees of drafts are built from it.

## Training

Text: the Python standard library, as for the target, and in one batch of $own_share the target's
own continuations ($own_tokens tokens, at temperatures 0, 0.8 and 1) of $own_prompts pieces of it.
Objective: $objective. $steps steps of $batch_tokens tokens in windows of $window; Muon for the
layers' matrices, AdamW for the rest; peak rate $lr, linear to zero over the last $decay of the
steps. The target stayed as it was. It took $minutes minutes of one shared CPU core in bfloat16
autocast, with Python $python.

    python -m engine.demo.training.train_heads $kind

## How often drafts are met

On the target's own continuations of $pieces held-out pieces ($places places at each temperature),
with drafts drawn by the same noise as the target's. By depth: the likeliest token, where those
before it were met. Tokens per step: with the best tree of so many nodes, 4 deep at most; of the
draft, with a chain.

$table

On held-out text as it is, the likeliest token by depth is the target's likeliest in $agreement of
cases; of the demo draft's tokens $draft_agreement are.

    python -m engine.demo.training.train_heads $kind --evaluate

## Licence

Made from the Python standard library, copyright Python Software Foundation, under the PSF License
Version 2 (some of its modules carry notices of their own). These weights are offered under the same
terms."""


@dataclass(frozen=True)
class HeadResults:
    """Measurements of a head, and of the demo draft for comparison."""

    pieces: int
    places: int  # positions measured at each temperature
    head: list[DraftMeasurement]
    draft: list[DraftMeasurement]
    agreement: list[float]  # by depth, see heads_evaluate.greedy_agreement()
    draft_agreement: float


def head_card(recipe: HeadRecipe, parameters: int, seconds: float, results: HeadResults) -> str:
    """Return the README of a head that took ``seconds`` to train."""
    title, about = ABOUT[recipe.kind]
    values = {
        **{key: str(value) for key, value in asdict(recipe).items()},
        "title": title,
        "about": about,
        "parameters": f"{parameters:,}",
        "objective": Template(OBJECTIVES[recipe.kind]).substitute(unrolled=recipe.unrolled),
        "lr": f"{recipe.lr:g}",
        "decay": f"{recipe.decay:.0%}",
        "minutes": f"{seconds / 60:.0f}",
        "python": platform.python_version(),
        "pieces": f"{results.pieces}",
        "places": f"{results.places:,}",
        "table": head_results_table(results),
        "agreement": ", ".join(f"{a:.1%}" for a in results.agreement),
        "draft_agreement": f"{results.draft_agreement:.1%}",
    }
    blocks = [wrapped(Template(block).substitute(values)) for block in CARD.split("\n\n")]
    return "\n\n".join(blocks) + "\n"


def head_results_table(results: HeadResults) -> str:
    """Return the measurements as a Markdown table, one row per proposer and temperature."""
    nodes = list(results.head[0].per_step)
    depths = len(results.draft[0].chain)
    head = [f"depth {d + 1}" for d in range(depths)] + ["depth 1, second"]
    head += [f"tokens per step, {n}" for n in nodes]
    lines = ["| | temperature | " + " | ".join(head) + " |", "|---" * (len(head) + 2) + "|"]
    for name, rows in (("this", results.head), ("demo draft", results.draft)):
        for row in rows:
            cells = [f"{c:.1%}" for c in row.chain] + ["-"] * (depths - len(row.chain))
            cells += [f"{row.second:.1%}"] + [f"{row.per_step[n]:.2f}" for n in nodes]
            lines.append(f"| {name} | {row.temperature:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
