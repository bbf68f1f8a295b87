"""Folders of trained heads, in the published layouts."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn

from engine.demo.export import WEIGHTS, model_config, write_json
from engine.demo.heads_models import MedusaHeads
from engine.demo.heads_recipe import HeadRecipe, make_head
from engine.demo.models import Llama
from engine.speculation.heads_tree import Prior


def export_head(
    head: nn.Module, target: Llama, recipe: HeadRecipe, prior: Prior, folder: Path
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
