"""Finds the model to serve: a folder, a hub id, or the demo model of the package."""

from __future__ import annotations

import difflib
from importlib.util import find_spec
from pathlib import Path

import msgspec

from cluster.models import download, hub
from cluster.models.download import DownloadProgress
from cluster.models.hub import HubRepo
from engine.model_config.checkpoint import load_config
from protocol.errors import StartupError, UsageError

DEMO_ID = "baton-demo"


class ServedModel(msgspec.Struct, frozen=True):
    """A checked model folder, and the id by which clients name the model."""

    path: Path
    id: str


class ModelLocation(msgspec.Struct, frozen=True):
    """The place of a model. ``path`` is None for a model of the hub that is not in the cache."""

    path: Path | None
    id: str
    repo: HubRepo | None = None


def demo_path() -> Path:
    """Return the folder of the demo model in the ``engine`` package, which is not imported."""
    spec = find_spec("engine")
    if spec is None or not spec.submodule_search_locations:
        raise StartupError("the engine package is not installed: run `pip install -e .`")
    return Path(next(iter(spec.submodule_search_locations))) / "demo" / "target"


def locate_model(wanted: str | None, *, weights: bool = True) -> ModelLocation:
    """Return the place of a model: None is the demo, otherwise a folder or a hub id ``owner/name``
    or ``owner/name@revision``. Only this machine's disk is searched. Without ``weights`` a router's
    files suffice.

    Raises UsageError, with similar names, for text that names neither."""
    if wanted is None:
        return ModelLocation(demo_path(), DEMO_ID)
    folder = Path(wanted).expanduser()
    if wanted and folder.is_dir():
        return ModelLocation(folder.resolve(), folder.resolve().name)
    repo = _as_repo(wanted)
    if repo is None or folder.is_file():
        raise UsageError(_not_found(wanted, folder))
    path = hub.cached_snapshot(repo, files_needed(weights=weights))
    if path is None and folder.parent.is_dir() and _near(folder):  # probably a folder was meant
        raise UsageError(_not_found(wanted, folder))
    return ModelLocation(path, repo.id, repo)


def files_needed(*, weights: bool) -> list[str]:
    """Return the patterns of the files that an engine needs, or a router, without ``weights``."""
    return hub.FILES if weights else hub.TOKENIZER_FILES


def _as_repo(wanted: str) -> HubRepo | None:
    name, _, revision = wanted.partition("@")
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or wanted.startswith((".", "~")):
        return None
    return HubRepo(name, revision or None)


def _not_found(wanted: str, folder: Path) -> str:
    text = f"model {wanted!r}: expected a folder or a hub id owner/name[@revision]"
    if folder.is_file():
        return f"{text}, but it is a file; give its folder: {folder.parent}"
    near = _near(folder) + _near_ids(wanted)
    similar = f"; similar names: {', '.join(near)}" if near else ""
    return f"{text}, but neither exists{similar}"


def _near(folder: Path) -> list[str]:
    """Return folders with names similar to the first missing part of the path."""
    missing, parent = folder, folder.parent
    while not parent.is_dir() and parent != parent.parent:
        missing, parent = parent, parent.parent
    try:
        names = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())
    except OSError:
        return []
    alike = difflib.get_close_matches(missing.name, names, n=3, cutoff=0.6)
    return [str(parent / name) for name in alike]


def _near_ids(wanted: str) -> list[str]:
    return difflib.get_close_matches(wanted, hub.cached_ids(), n=2, cutoff=0.6)


def _silent(_done: int, _total: int) -> None:
    pass


def resolve_model(
    wanted: str | None,
    model_id: str | None = None,
    progress: DownloadProgress = _silent,
    *,
    weights: bool = True,
) -> ServedModel:
    """Return the model that ``wanted`` names (see ``locate_model``), after a download if needed.

    Without ``weights`` only the config and the tokenizer are fetched and looked for. Raises
    StartupError when the model cannot be found, fetched or served.
    """
    found = locate_model(wanted, weights=weights)
    path = found.path
    if path is None:
        assert found.repo is not None
        # The config comes first, so that an unsupported model costs no download.
        load_config(download.download_snapshot(found.repo, hub.CONFIGS, _silent))
        files = files_needed(weights=weights)
        path = download.download_snapshot(found.repo, files, progress)
    check_model_folder(path, weights=weights)
    return ServedModel(path, model_id or found.id)


def check_model_folder(path: Path, *, weights: bool = True) -> None:
    """Raise StartupError unless ``path`` holds a supported model in the layout of Hugging Face,
    which may lack its weights without ``weights``. Only its config is read."""
    if not path.is_dir():
        raise StartupError(f"model folder {path} does not exist")
    if (path / "config.json").is_file():
        load_config(path)
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if weights and not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise StartupError(f"model folder {path} has no {', '.join(missing)}{_elsewhere(path)}")


def _elsewhere(path: Path) -> str:
    """Suggest a subfolder that contains a model."""
    inside = [found.parent for depth in ("*", "*/*") for found in path.glob(f"{depth}/config.json")]
    return f"; give {inside[0]} instead?" if inside else ""
