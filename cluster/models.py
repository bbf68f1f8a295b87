"""Which model to serve: a folder, a hub id, or the demo model that comes with the package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import msgspec

from engine.checkpoint import load_config
from protocol.errors import StartupError

DEMO_ID = "baton-demo"
_HUB_FILES = ["config.json", "generation_config.json", "tokenizer*", "*.safetensors*", "*.jinja"]

_NOT_NEEDED = ["consolidated*"]  # the same weights once more, in Mistral's own layout


class Model(msgspec.Struct, frozen=True):
    """A checked model folder, and the id that clients name it by."""

    path: Path
    id: str


def demo_path() -> Path:
    """Folder of the demo model beside the installed ``engine`` package, which is not imported."""
    spec = find_spec("engine")
    if spec is None or not spec.submodule_search_locations:
        raise StartupError("the engine package is not installed: run `pip install -e .`")
    return Path(next(iter(spec.submodule_search_locations))) / "demo" / "target"


def resolve(wanted: str | None, model_id: str | None = None) -> Model:
    """The model that ``wanted`` names: None for the demo, a folder, or a hub id ``owner/name``.

    Raises StartupError when it cannot be found, fetched or served.
    """
    if wanted is None:
        path, default_id = demo_path(), DEMO_ID
    elif Path(wanted).expanduser().is_dir():
        path = Path(wanted).expanduser().resolve()
        default_id = path.name
    elif _looks_like_hub_id(wanted):
        path, default_id = _download(wanted), wanted
    else:
        raise StartupError(f"model {wanted!r}: expected a folder or a hub id owner/name")
    check(path)
    return Model(path, model_id or default_id)


def check(path: Path) -> None:
    """Raises StartupError unless ``path`` holds a model that the engine supports, as Hugging Face
    lays it out. Nothing but its config is read."""
    if not path.is_dir():
        raise StartupError(f"model folder {path} does not exist")
    if (path / "config.json").is_file():
        load_config(path)
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise StartupError(f"model folder {path} has no {', '.join(missing)}")


def _looks_like_hub_id(text: str) -> bool:
    parts = text.split("/")
    return len(parts) == 2 and all(parts) and not text.startswith((".", "~"))


def _download(hub_id: str) -> Path:
    """The hub's snapshot of ``hub_id`` in the local cache, fetched if it is not there: its config
    first, so that a model that is not supported costs no download."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        load_config(Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES[:2])))
        return Path(
            snapshot_download(hub_id, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_NEEDED)
        )
    except LocalEntryNotFoundError as e:
        raise StartupError(
            f"model {hub_id!r} is not in the local cache and the hub cannot be reached; "
            "give a folder with --model instead, or go online"
        ) from e
    except (OSError, ValueError) as e:  # the hub's errors are OSErrors, a bad id a ValueError
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise StartupError(f"model {hub_id!r} cannot be fetched from the hub: {reason}") from e
