"""The body of a request, in the words that the server takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from bench.serve.options import Endpoint, Options


class Dialect(NamedTuple):
    """``ids``: prompts are token ids, else text. ``token_ids``: chunks say which tokens they have.
    ``usage``: the stream ends with the counts."""

    ids: bool
    token_ids: bool
    usage: bool

    def says(self) -> str:
        prompt = "token ids" if self.ids else "text"
        counts = "each chunk" if self.token_ids else "usage" if self.usage else "chunks counted"
        return f"prompts as {prompt}; token counts from {counts}"


def dialects(endpoint: Endpoint) -> list[Dialect]:
    """What to try, the most exact first."""
    forms = ((True, True), (True, False), (False, True), (False, False))
    tried = [Dialect(*form, True) for form in forms if endpoint == "completions" or not form[0]]
    return [*tried, Dialect(False, False, False)]


class Body:
    """Writes bodies; what is the same for all is encoded once."""

    def __init__(self, options: Options, model: str, dialect: Dialect) -> None:
        fields: dict[str, Any] = {
            "model": model,
            "stream": True,
            "temperature": options.temperature,
        }
        if dialect.usage:
            fields["stream_options"] = {"include_usage": True}
        if dialect.token_ids:
            fields["return_token_ids"] = True
        if options.ignore_eos:
            fields["ignore_eos"] = True
        head = msgspec.json.encode(fields | options.extra_body)[:-1]
        chat = options.endpoint == "chat"
        self._before = head + (b',"messages":[{"role":"user","content":' if chat else b',"prompt":')
        self._after = b'}],"max_tokens":%d}' if chat else b',"max_tokens":%d}'

    def json(self, prompt: bytes, output: int) -> bytes:
        """``prompt``: JSON. ``output``: tokens at most."""
        return self._before + prompt + self._after % output
