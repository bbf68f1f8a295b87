"""``read_json_file``: the JSON files of model folders, which anybody may have written.

Called for configs of models, heads and tokenizers. A file that is large or nested deeply is refused
before it can take the memory or the stack of the process that reads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protocol.errors import StartupError

MAX_CONFIG_BYTES = 4 << 20
"""Of a config: those of the largest models have some 100 kB."""

MAX_TOKENIZER_BYTES = 256 << 20
"""Of a ``tokenizer.json``: vocabularies of 256,000 tokens with their merges have some 35 MB."""


def read_json_file(path: Path, max_bytes: int = MAX_CONFIG_BYTES, what: str = "JSON file") -> Any:
    """Return the value in a file. Raises StartupError, which names the file and ``what`` it should
    be, where it cannot be read, has more than ``max_bytes``, is not JSON in UTF-8, or is nested too
    deeply."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise StartupError(f"{path}: has {size} bytes, expected at most {max_bytes}")
        data = path.read_bytes()
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return json.loads(data)
    except ValueError as error:  # also UnicodeDecodeError, and integers of thousands of digits
        raise StartupError(f"{path}: not a usable {what}: {str(error)[:200]}") from error
    except RecursionError:
        raise StartupError(f"{path}: not a usable {what}: nested too deeply") from None
