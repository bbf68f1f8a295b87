"""Downloads that several processes of a node want, that are slow, break off, or need a token: from
a real server on loopback, each process with an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.models import locate
from tests.cluster.hub_server import Hub, files_of, serving

STALLED_S = 1.5
TOKEN = "hf_known-only-to-acme"
WEIGHTS = bytes(24 << 20)
SCRIPT = """
import json, logging, os, sys, time
logging.basicConfig(level=logging.INFO)
from cluster.models import download, locate
from protocol.errors import StartupError
fetch, stalled_s = download.download_snapshot, float(sys.argv[1])
download.download_snapshot = lambda repo, files, said: fetch(repo, files, said, stalled_s)
seen, began, answer = [], time.monotonic(), {}
try:
    found = locate.resolve_model("owner/name", None, lambda *p: seen.append(p),
                                 weights=sys.argv[2] == "weights")
    answer = {"path": str(found.path)}
except StartupError as e:
    answer = {"error": str(e)}
print(json.dumps({**answer, "seen": seen, "seconds": time.monotonic() - began}))
sys.stdout.flush(); os._exit(0)
"""


REPLICA = """
import os
from bench.lib.settings import router_settings
from cluster.serve.replicas import resolve_router_model
settings = router_settings(model_path="owner/name", model_id="mine")
print(resolve_router_model(settings).model_path, flush=True)
os._exit(0)
"""


def start(
    url: str, cache: Path, *, weights: bool = True, stalled_s: float = STALLED_S, **env: str
) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", **env}
    wanted = "weights" if weights else "tokenizer"
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(stalled_s), wanted],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def end(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """The answer of the process, and all that it has written."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    answer: dict[str, Any] = json.loads(out)
    return answer, out + err


def model() -> dict[str, bytes]:
    return {**files_of(locate.demo_path()), "model.safetensors": WEIGHTS}


def test_two_processes_of_a_node_download_a_model_once(tmp_path: Path) -> None:
    """The second waits for longer than a silent hub may be silent, and shows the first's bytes."""
    hub = Hub(model(), slow="model.safetensors", parts=24, pause_s=0.25)
    with serving(hub):
        first = start(hub.url, tmp_path)
        while not hub.sent:
            time.sleep(0.05)
        second = start(hub.url, tmp_path)
        answers = [end(process)[0] for process in (first, second)]
    assert answers[0].get("path") == answers[1].get("path") is not None, answers
    assert answers[1]["seconds"] > 2 * STALLED_S, "it did not wait for long enough to be given up"
    assert sorted(hub.fetched) == sorted(set(hub.fetched)), "a file was sent twice"
    assert any(0 < done <= total for done, total in answers[1]["seen"])


def test_waiting_process_goes_on_when_the_downloading_one_dies(tmp_path: Path) -> None:
    hub = Hub(model(), slow="model.safetensors", parts=24, pause_s=0.1)
    with serving(hub):
        first = start(hub.url, tmp_path)
        while not hub.sent:
            time.sleep(0.05)
        second = start(hub.url, tmp_path)
        time.sleep(0.5)
        first.kill()
        first.communicate()
        answer, _ = end(second)
    assert "path" in answer, answer
    assert hub.fetched.count("model.safetensors") == 2
    assert set(map(hub.fetched.count, set(hub.fetched) - {"model.safetensors"})) == {1}


def test_waiting_process_shows_why_the_hub_is_given_up(tmp_path: Path) -> None:
    hub = Hub(model(), stalls="model.safetensors")
    with serving(hub):
        answers = [end(each)[0] for each in [start(hub.url, tmp_path) for _ in range(2)]]
    for answer in answers:
        assert "has sent nothing for" in answer["error"], answer
        assert answer["seconds"] < 30


def test_router_needs_no_weights(tmp_path: Path) -> None:
    files = {**model(), "chat_template.jinja": b"{{ messages }}"}
    with serving(Hub(files)) as hub:
        answer, _ = end(start(hub.url, tmp_path, weights=False))
        assert "path" in answer, answer
        assert not [name for name in hub.fetched if name.endswith(".safetensors")]
        assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= set(hub.fetched)
        before = list(hub.fetched)
        end(start(hub.url, tmp_path, weights=False))
        assert hub.fetched == before, "the files are in the cache"
        worker, _ = end(start(hub.url, tmp_path))
    assert worker["path"] == answer["path"]
    assert hub.fetched == [*before, "model.safetensors"]


def test_replica_of_a_router_fetches_no_weights(tmp_path: Path) -> None:
    with serving(Hub(model())) as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-c", REPLICA]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert Path(run.stdout.strip()).joinpath("tokenizer.json").is_file(), run.stderr
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]


def test_connection_that_breaks_is_made_again(tmp_path: Path) -> None:
    hub = Hub(model(), slow="model.safetensors", pause_s=0.02, resets=2)
    with serving(hub):
        answer, _ = end(start(hub.url, tmp_path, stalled_s=20.0))
    assert "path" in answer, answer
    assert hub.resets == 0 and hub.fetched.count("model.safetensors") == 3


def test_gated_model_is_fetched_with_the_token_of_the_environment(tmp_path: Path) -> None:
    with serving(Hub(model(), token=TOKEN)) as hub:
        refused, _ = end(start(hub.url, tmp_path))
        answer, shown = end(start(hub.url, tmp_path, HF_TOKEN=TOKEN))
    assert "is gated: accept its terms" in refused["error"]
    assert "path" in answer, answer
    assert TOKEN not in shown


@pytest.mark.parametrize("token", ["hf_sec\x01ret", "hf_sécret", "hf_two words-secret"])
def test_token_that_cannot_be_sent_is_not_shown(tmp_path: Path, token: str) -> None:
    with serving(Hub(model(), token=TOKEN)) as hub:
        answer, shown = end(start(hub.url, tmp_path, HF_TOKEN=token))
    assert "HF_TOKEN" in answer["error"]
    assert "ret" not in shown.replace("return", "") and "secret" not in shown
