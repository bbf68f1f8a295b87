"""Parameters of OpenAI and vLLM that are not built yet.

A client may send one at the value that changes nothing; at any other it is refused by name, because
ignoring it would answer another question than the one asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.errors import invalid

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "suffix": ("",),
    "length_penalty": (1,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "detokenize": (True,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
}


def is_unsupported(name: str) -> bool:
    return name in _NEUTRAL


def check_unsupported(given: Mapping[str, Any]) -> None:
    """Raises ApiError (400) for the first parameter that asks for what is not built."""
    for name, value in given.items():
        neutral = _NEUTRAL.get(name)
        if neutral is None or any(_same(value, wanted) for wanted in neutral):
            continue
        only = " or ".join(json.dumps(wanted) for wanted in (*neutral, None))
        raise invalid(
            f"{name} is not supported yet: leave it out, or at {only}",
            name,
            "unsupported_parameter",
        )


def _same(value: Any, wanted: Any) -> bool:
    """Equal as JSON: ``true`` is not 1."""
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)
