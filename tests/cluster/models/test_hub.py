"""Downloads from a hub, a real server on loopback; each in a process of its own, because the
client reads its environment once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.models import locate
from tests.cluster.hub_server import Hub, files_of, serving

SCRIPT = """
import json, sys, time
from cluster.models import download, hub, locate
from cluster.doctor import model
from cluster.doctor.subject import DoctorSubject
from protocol.errors import StartupError
seen, began, answer = [], time.monotonic(), {}
try:
    listed = model.collect(DoctorSubject(model=sys.argv[1]))
    answer["to_fetch"] = listed.to_fetch.bytes if listed.to_fetch else None
    if sys.argv[2:]:
        repo, limit_s = hub.HubRepo("owner/name"), float(sys.argv[2])
        download.download_snapshot(repo, hub.FILES, lambda *p: seen.append(p), limit_s)
    found = locate.resolve_model(sys.argv[1], None, lambda *p: seen.append(p))
    answer |= {"path": str(found.path), "id": found.id}
except StartupError as e:
    answer["error"] = str(e)
print(json.dumps({**answer, "seen": seen, "seconds": time.monotonic() - began}))
import os; sys.stdout.flush(); os._exit(0)
"""


def resolve(url: str, cache: Path, model: str, *more: str, **env: str) -> dict[str, object]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", **env}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, model, *more],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    answer: dict[str, object] = json.loads(run.stdout)
    return answer


def test_a_model_is_fetched_once_and_then_needs_no_hub(tmp_path: Path) -> None:
    files = {**files_of(locate.demo_path()), "model.py": b"never", "consolidated.safetensors": b"x"}
    with serving(Hub(files)) as hub:
        first = resolve(hub.url, tmp_path, "owner/name@main")
        url = hub.url
    assert first.get("id") == "owner/name", first
    assert first["to_fetch"] == sum(len(files[name]) for name in set(hub.fetched))
    assert "model.py" not in hub.fetched and "consolidated.safetensors" not in hub.fetched
    assert Path(str(first["path"])).joinpath("model.safetensors").is_file()
    again = resolve(url, tmp_path, "owner/name@main", HF_HUB_OFFLINE="1")
    assert again["path"] == first["path"] and again["to_fetch"] is None


@pytest.mark.parametrize(
    ("refuses", "says"),
    [
        ("GatedRepo", "is gated: accept its terms"),
        ("RepoNotFound", "is not on the hub, or private"),
        ("RevisionNotFound", "no revision 'v9'"),
    ],
)
def test_what_the_hub_refuses_is_told_with_what_to_do(
    tmp_path: Path, refuses: str, says: str
) -> None:
    with serving(Hub({}, refuses=refuses)) as hub:
        assert says in str(resolve(hub.url, tmp_path, "owner/name@v9")["error"])


def test_no_hub_at_all(tmp_path: Path) -> None:
    answer = resolve("http://127.0.0.1:9", tmp_path, "owner/name")
    assert "cannot be reached" in str(answer["error"])


def test_a_model_that_is_not_supported_costs_no_download(tmp_path: Path) -> None:
    files = {**files_of(locate.demo_path()), "config.json": b'{"architectures": ["Other"]}'}
    with serving(Hub(files)) as hub:
        answer = resolve(hub.url, tmp_path, "owner/name")
    assert "Other is not supported" in str(answer["error"])
    assert set(hub.fetched) <= {"config.json", "generation_config.json"}


def test_a_download_that_stands_still_is_given_up(tmp_path: Path) -> None:
    files = {**files_of(locate.demo_path()), "model.safetensors": bytes(30 << 20)}
    with serving(Hub(files, stalls="model.safetensors")) as hub:
        answer = resolve(hub.url, tmp_path, "owner/name", "1.0")
    assert "has sent nothing for 1 s" in str(answer["error"])
    assert isinstance(answer["seconds"], float) and answer["seconds"] < 15
    seen = answer["seen"]
    assert isinstance(seen, list) and 0 < max(done for done, _ in seen) < 30 << 20
