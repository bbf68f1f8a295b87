"""What is known of a prompt's tokens: one of its choices asks for it, all of them show it."""

from __future__ import annotations

import asyncio

from protocol.logprobs import Logprobs


class PromptScores:
    """``values``: of each token from the second on; empty until they are known. They come with the
    first tokens of the choice that asks; its deadlines end the others, too."""

    def __init__(self) -> None:
        self.values: list[Logprobs] = []
        self._known = asyncio.Event()

    def tell(self, values: list[Logprobs]) -> None:
        if not self._known.is_set():
            self.values = values
            self._known.set()

    async def known(self) -> None:
        await self._known.wait()
