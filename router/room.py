"""Whether prompt and output fit the model."""

from __future__ import annotations

from typing import NamedTuple

from protocol.directory import ModelInfo
from router.errors import invalid


class Room(NamedTuple):
    """Names the fields that a message about too long a request speaks of."""

    prompt: str
    output: str

    def check(self, prompt: int, output: int, model: ModelInfo) -> None:
        """Raises ApiError (400) when so many tokens do not fit the model together."""
        if not prompt:
            raise invalid(f"{self.prompt} holds no tokens", self.prompt)
        if prompt + output > model.max_model_len:
            raise invalid(
                f"the model takes {model.max_model_len} tokens, prompt and output together; this"
                f" request has {prompt} in the prompt and asks for {output} ({self.output})",
                self.prompt if prompt >= model.max_model_len else self.output,
                "context_length_exceeded",
            )
