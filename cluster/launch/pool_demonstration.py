"""A request that shows both pools of a new cluster at work; `baton up` sends it for the demo model.

An idle decode worker computes short prompts itself. So one stream decodes while the prompt arrives:
the router then sends the prompt to a prefill worker, which hands over its KV cache. Nothing depends
on the outcome: a request that fails, or that the router places otherwise, is reported as it is.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Mapping
from typing import Any

from cluster.serve.router_probe import RouterProbe

_TIMEOUT_S = 10.0
_STREAM_TOKENS = 64
_ANSWER_TOKENS = 16
_FUNCTION = """\
def parse_line_{n}(line, sep=","):
    parts = [part.strip() for part in line.split(sep)]
    if not parts:
        raise ValueError("an empty line")
    return parts

"""
_PROMPT = "".join(_FUNCTION.format(n=n) for n in range(10)) + "def parse_file(path):\n"


def demonstrate_pools(probe: RouterProbe, model_id: str) -> str:
    """Send the requests; return a line on the steps of the second one, or on why there is none."""
    connection = probe.connection(_TIMEOUT_S)
    try:
        _send(connection, model_id, "def fibonacci(n):\n", _STREAM_TOKENS, stream=True)
        stream = connection.getresponse()
        stream.readline()  # it decodes from now on
        reading = threading.Thread(target=stream.read, daemon=True)
        reading.start()
        line = _timed_request(probe, model_id)
        reading.join(_TIMEOUT_S)
        return line
    except (OSError, http.client.HTTPException) as error:
        return f"no demonstration: {error}"
    finally:
        connection.close()


def _timed_request(probe: RouterProbe, model_id: str) -> str:
    connection = probe.connection(_TIMEOUT_S)
    try:
        _send(connection, model_id, _PROMPT, _ANSWER_TOKENS, stream=False)
        answer = json.loads(connection.getresponse().read())
        return describe_steps(answer)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        return f"no demonstration: the answer has no timeline ({type(error).__name__})"
    finally:
        connection.close()


def _send(
    connection: http.client.HTTPConnection, model_id: str, prompt: str, tokens: int, *, stream: bool
) -> None:
    body = {"model": model_id, "prompt": prompt, "max_tokens": tokens, "stream": stream}
    body |= {"ignore_eos": True, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    headers |= {"x-baton-explain": "1", "x-baton-timeline": "1"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)


def describe_steps(answer: Mapping[str, Any]) -> str:
    """Return a line on the workers of an answer and the times of its steps. Raises KeyError and the
    like for an answer without a timeline."""
    usage, chosen = answer["usage"], answer["baton"]["attempts"][-1]["chosen"]
    times: dict[str, float] = answer["baton"]["timeline"][0]
    prompt = f"a prompt of {usage['prompt_tokens']} tokens beside a running stream"
    decode, prefill = chosen["decode"][:6], chosen["prefill"]
    first, end = times["first_token"], times["finished"]
    written = f"{usage['completion_tokens']} tokens in {_ms(end - first)}"
    if prefill is None:
        return f"{prompt}: prefill and decode on worker {decode}: {_ms(first)}, {written}"
    handed = _ms(times["decode_started"] - first)
    return (
        f"{prompt}: prefill on worker {prefill[:6]} {_ms(first)}, hand-over of its KV {handed},"
        f" decode on worker {decode} {written}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
