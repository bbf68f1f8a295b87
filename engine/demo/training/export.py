"""Export of a demo model as a Hugging Face folder, and loading of its weights for evaluation.

The chat template renders a conversation as a Python file in which the other roles' messages are
comments: the models know Python and no chats, so their answer is the code that may follow. Tool
calls are in the Hermes format; only a grammar makes these models write one.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from engine.demo.training.corpus import BOS, EOS, VOCAB_SIZE, special_ids
from engine.demo.training.networks import MAX_LEN, Llama, LlamaShape

WEIGHTS = "model.safetensors"

CHAT_TEMPLATE = """\
{{ bos_token }}
{%- if tools %}
    {{- '# Tools, called as <tool_call>{"name": ..., "arguments": ...}</tool_call>:\\n' }}
    {%- for tool in tools %}
        {{- '# ' ~ tool | tojson ~ '\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '\\n' ~ message.content ~ '\\n\\n' if message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n' ~ call.function | tojson ~ '\\n</tool_call>\\n' }}
        {%- endfor %}
    {%- else %}
        {{- '# ' ~ message.role ~ ': ' ~ message.content | replace('\\n', '\\n# ') ~ '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '\\n' }}
{%- endif %}
"""


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load(folder: Path, shape: LlamaShape) -> Llama:
    """Load an exported model, with its bfloat16 weights converted to float32."""
    model = Llama(shape, seed=0)
    model.load_state_dict({k: v.float() for k, v in load_file(folder / WEIGHTS).items()})
    return model.eval()


def export(model: Llama, tokenizer: Tokenizer, folder: Path, card: str) -> None:
    """Write a Hugging Face folder; each file is replaced atomically."""
    bos, eos = special_ids(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        new = Path(temporary)
        weights = {k: v.detach().bfloat16().contiguous() for k, v in model.state_dict().items()}
        save_file(weights, new / WEIGHTS, metadata={"format": "pt"})
        write_json(new / "config.json", model_config(model.shape, bos, eos))
        write_json(new / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos})
        write_json(new / "tokenizer_config.json", tokenizer_config())
        tokenizer.save(str(new / "tokenizer.json"))
        (new / "README.md").write_text(card, encoding="utf-8")
        for path in sorted(new.iterdir()):
            path.chmod(0o644)
            path.replace(folder / path.name)


def model_config(s: LlamaShape, bos: int, eos: int) -> dict[str, object]:
    """Return the content of ``config.json``."""
    return {
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


def tokenizer_config() -> dict[str, object]:
    """Return the content of ``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": MAX_LEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
