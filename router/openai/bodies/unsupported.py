"""Parameters of OpenAI and vLLM that are not supported.

A client may send one with the value that changes nothing. Any other value is refused by name,
because ignoring it would answer a different request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.common.errors import invalid

NeutralValues = Mapping[str, tuple[Any, ...]]
"""Parameter name -> values at which it changes nothing; ``null`` is always one of them."""

_COMMON: NeutralValues = {
    "length_penalty": (1,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "stop_regex": ([],),
    "lora_path": (),
}

COMPLETION_UNSUPPORTED: NeutralValues = {**_COMMON, "suffix": ("",), "max_completion_tokens": ()}

CHAT_UNSUPPORTED: NeutralValues = {
    **_COMMON,
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "functions": (),
    "function_call": ("none",),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "truncate_prompt_tokens": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}

_WHY = {
    "chat_template": "the template is the operator's: it runs in the server",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "max_completion_tokens": "completions have max_tokens",
}


def check_unsupported(given: Mapping[str, Any], neutral: NeutralValues) -> None:
    """Raise ApiError (400) for the first parameter with an unsupported value."""
    for name, value in given.items():
        values = neutral.get(name)
        if values is None or any(_equal_in_json(value, wanted) for wanted in values):
            continue
        only = " or ".join(json.dumps(wanted) for wanted in (*values, None))
        why = f" ({_WHY[name]})" if name in _WHY else ""
        raise invalid(
            f"{name} is not supported{why}: leave it out, or send {only}",
            name,
            "unsupported_parameter",
        )


def _equal_in_json(value: Any, wanted: Any) -> bool:
    """Return whether the values are equal in JSON, where ``true`` is not 1."""
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)
