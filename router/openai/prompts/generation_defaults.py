"""The sampling that a model recommends, from its ``generation_config.json``.

It counts where a request sets none, in all dialects (``api.generation_config``). ``router.http``
reads it at the start and fills it into each body before the body is checked.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import StartupError
from router.openai.bodies.generation_body import GenerationBody

log = logging.getLogger(__name__)

_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0, "repetition_penalty": 1.0}
"""Fields that are read, and the values that transformers gives them in files whose author has not
chosen any. Those are not taken over, as by vLLM."""


class GenerationDefaults(NamedTuple):
    """Sampling by field name, and the most tokens of an output that no request has bounded."""

    sampling: Mapping[str, float] = {}
    max_tokens: int | None = None

    def fill(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a body with the fields that the client has left out."""
        if not self.sampling:
            return raw
        return {**raw, **{n: v for n, v in self.sampling.items() if raw.get(n) is None}}


def load_generation_defaults(folder: str) -> GenerationDefaults:
    """Read the file of a model's folder. A value out of range is left out, with a warning. Raises
    StartupError for a file that cannot be read."""
    path = Path(folder) / "generation_config.json"
    try:
        given = json.loads(path.read_text())
    except FileNotFoundError:
        return GenerationDefaults()
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(given, dict):
        return GenerationDefaults()
    sampling: dict[str, float] = {}
    for name, unset in _SAMPLING.items():
        value = given.get(name)
        if value is None or value == unset:
            continue
        if _is_valid(name, value):
            sampling[name] = value
        else:
            log.warning("%s: %s is out of range and not used: %.80r", path, name, value)
    most = given.get("max_new_tokens")
    bounded = type(most) is int and 1 <= most < 2**31
    return GenerationDefaults(sampling, most if bounded else None)


def _is_valid(name: str, value: Any) -> bool:
    """Return whether a request could have this value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    try:
        GenerationBody.model_validate({name: value})
    except ValueError:
        return False
    return True
