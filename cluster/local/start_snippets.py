"""The commands and the program that `baton up` prints when a cluster serves, ready to be pasted."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

_EXAMPLE_PROMPT = "def fibonacci(n):"
DEFAULT_CLUSTER = "default"


def baton_command(command: str, cluster: str) -> str:
    """Return a `baton` command for the cluster, with the path of the program unless it is found
    without one."""
    program = "baton"
    beside = Path(sys.executable).parent / "baton"
    if shutil.which("baton") is None and beside.is_file():
        here = os.path.relpath(beside)
        program = shlex.quote(str(beside) if here.startswith("..") else here)
    named = "" if cluster == DEFAULT_CLUSTER else f" --cluster {shlex.quote(cluster)}"
    return f"{program} {command}{named}"


def curl_command(url: str, model_id: str, *, keys: bool = False, ca: str | None = None) -> str:
    """Return a command that streams a completion; with ``keys`` it sends $OPENAI_API_KEY. ``ca``:
    file of the CA that issued the server's certificate; None: a public one, or plain HTTP."""
    body = {"model": model_id, "prompt": _EXAMPLE_PROMPT, "max_tokens": 64, "stream": True}
    data = json.dumps(body).replace("'", "'\\''")
    trust = f"--cacert {shlex.quote(ca)} " if ca else ""
    key = '  -H "Authorization: Bearer $OPENAI_API_KEY" \\\n' if keys else ""
    return (
        f"curl -N {trust}{url}/v1/completions \\\n{key}"
        f"  -H 'Content-Type: application/json' \\\n  -d '{data}'"
    )


def python_snippet(url: str, model_id: str, *, keys: bool = False, ca: str | None = None) -> str:
    """Return a program that does the same with the ``openai`` package."""
    key = 'os.environ["OPENAI_API_KEY"]' if keys else '"none"'
    imports = [*(["import os"] if keys else []), *(["import ssl"] if ca else [])]
    names = "DefaultHttpxClient, OpenAI" if ca else "OpenAI"
    client = f'client = OpenAI(base_url="{url}/v1", api_key={key})'
    if ca:
        client = (
            f"trust = ssl.create_default_context(cafile={ca!r})\n"
            f'client = OpenAI(\n    base_url="{url}/v1",\n    api_key={key},\n'
            "    http_client=DefaultHttpxClient(verify=trust),\n)"
        )
    return (
        "".join(f"{line}\n" for line in imports)
        + "\n" * bool(imports)
        + f"from openai import {names}\n\n{client}\n"
        "for part in client.completions.create(\n"
        f"    model={model_id!r}, prompt={_EXAMPLE_PROMPT!r}, max_tokens=64, stream=True\n"
        "):\n"
        '    print(part.choices[0].text, end="", flush=True)'
    )
