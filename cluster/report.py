"""Shows the stages of a start: a line each with its time, and at the end what to paste."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import assert_never

from rich.console import Console
from rich.status import Status

from cluster.events import Began, Done, Event, Failed, Note, Ready

_EXAMPLE_PROMPT = "def fibonacci(n):"


class Reporter:
    """Prints events. On a terminal the running stage has a spinner; elsewhere lines are plain."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._clock = clock
        self._began = clock()
        self._stage_began = self._began
        self._status: Status | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case Began(stage):
                self._stage_began = self._clock()
                self._spin(stage)
            case Note(text):
                self._note(text)
            case Done(stage, text):
                self._spin(None)
                elapsed = self._clock() - self._stage_began
                self._line(f"{stage:<8} {text}  ({elapsed:.1f} s)")
            case Failed(stage, reason):
                self._spin(None)
                self._line(f"{stage:<8} failed: {reason}", style="bold red")
            case Ready(url, model_id):
                self._spin(None)
                self._ready(url, model_id)
            case _:
                assert_never(event)

    def say(self, text: str) -> None:
        """A line of its own."""
        self._spin(None)
        self._line(text)

    def close(self) -> None:
        self._spin(None)

    def _spin(self, stage: str | None) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if stage is not None and self._console.is_terminal:
            self._status = self._console.status(f"{stage} ...")
            self._status.start()

    def _note(self, text: str) -> None:
        if not text.endswith("%"):
            self._line(f"         {text}", style="dim")
        elif self._status is not None:  # how far it is: worth a word, not a line
            self._status.update(f"{text} ...")

    def _line(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False)

    def _ready(self, url: str, model_id: str) -> None:
        self._line(f"ready    {self._clock() - self._began:.1f} s in all\n")
        self._line(f"URL      {url}")
        self._line(f"model    {model_id}\n")
        self._line(curl_command(url, model_id) + "\n")
        self._line(python_snippet(url, model_id))


def curl_command(url: str, model_id: str) -> str:
    """A command to paste that streams a completion."""
    body = {"model": model_id, "prompt": _EXAMPLE_PROMPT, "max_tokens": 64, "stream": True}
    data = json.dumps(body).replace("'", "'\\''")
    return (
        f"curl -N {url}/v1/completions \\\n  -H 'Content-Type: application/json' \\\n  -d '{data}'"
    )


def python_snippet(url: str, model_id: str) -> str:
    """The same with the ``openai`` package."""
    return (
        "from openai import OpenAI\n\n"
        f'client = OpenAI(base_url="{url}/v1", api_key="none")\n'
        "for part in client.completions.create(\n"
        f"    model={model_id!r}, prompt={_EXAMPLE_PROMPT!r}, max_tokens=64, stream=True\n"
        "):\n"
        '    print(part.choices[0].text, end="", flush=True)'
    )
