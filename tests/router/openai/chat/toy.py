"""Small tokenizers of both kinds that chat models have, and chat templates in three styles."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

TEXT = ["def hello(self): return 1\n", "The quick 🦊 über alles, user\nassistant <|im"] * 20
CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "[INST]", "[/INST]"]
CONTROL += ["<|start_header_id|>", "<|end_header_id|>", "[TOOL_CALLS]"]
PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """
{%- macro said(message) %}{{ message.role + '\\n' + message.content }}{% endmacro %}
{%- if tools %}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
# Tools
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
Call: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}{% continue %}{% endif %}
<|im_start|>{{ said(message) }}
    {%- for call in message.tool_calls or [] %}
        {%- generation %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
        {%- endgeneration %}
    {%- endfor %}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""

LLAMA3 = """
{{- bos_token }}
{%- set ns = namespace(system='You help.') %}
{%- for message in messages if message['role'] == 'system' %}
    {%- set ns.system = message['content'] | trim %}
{%- endfor %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + ns.system }}
{%- if tools is not none %}
    {{- '\\nAnswer with {"name": function name, "parameters": its arguments}.\\n' }}
    {{- tools | tojson(indent=4) }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages if message.role != 'system' %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user and assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.first and system is defined else '') }}
        {{- message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
STYLES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL}


def byte_level() -> Tokenizer:
    """As Llama 3's and Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _trained(tokenizer, alphabet)


def sentence_piece() -> Tokenizer:
    """As Llama 2's and Mistral's: a text begins with a space, unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    letters = [chr(c) for c in range(33, 127)]
    return _trained(tokenizer, letters, [f"<0x{b:02X}>" for b in range(256)])


def _trained(
    tokenizer: Tokenizer, alphabet: list[str], first: list[str] | None = None
) -> Tokenizer:
    """``first``: tokens that are no added ones."""
    trainer = BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", *(first or [])],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN])
    return tokenizer


TOKENIZERS = {"byte-level": byte_level, "sentence-piece": sentence_piece}


def save(folder: Path, tokenizer: Tokenizer, template: str | None) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
