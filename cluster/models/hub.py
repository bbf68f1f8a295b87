"""Models of the Hugging Face hub: the local cache, listings, and downloads that report progress.

Only configs, tokenizers and safetensors are fetched; no code of a repository is ever run.
``locate``, ``drafting`` and the doctor call it.
"""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import StartupError

CONFIGS = ["config.json", "generation_config.json"]
FILES = [*CONFIGS, "tokenizer*", "*.safetensors*", "*.jinja"]
NOT_NEEDED = ["consolidated*", "*/*"]  # copies of the weights in other layouts

STALLED_S = 60.0
"""Longest time in seconds that a download may receive nothing."""
_POLL_S = 0.2

DownloadProgress = Callable[[int, int], None]
"""Called with the bytes that are present and the bytes in all."""


class HubRepo(msgspec.Struct, frozen=True):
    """A repository ``owner/name`` at a revision: a branch, a tag or a commit."""

    id: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id


class HubListing(msgspec.Struct, frozen=True):
    """Number and total bytes of the files that a download would fetch."""

    files: int
    bytes: int


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_ids() -> list[str]:
    """Return the ids of models with files in the cache."""
    folders = cache_folder().glob("models--*--*")
    return ["/".join(folder.name.split("--")[1:3]) for folder in folders]


def cached_snapshot(repo: HubRepo) -> Path | None:
    """Return the snapshot in the local cache; None when it is missing or incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                repo.id,
                revision=repo.revision,
                allow_patterns=FILES,
                ignore_patterns=NOT_NEEDED,
                local_files_only=True,
            )
        )
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise explain_hub_error(repo, error) from error


def list_files(repo: HubRepo, timeout_s: float) -> HubListing:
    """List the files on the hub. Raises StartupError when there are none, or after the timeout."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils._paths import filter_repo_objects

    try:
        info = HfApi().model_info(
            repo.id, revision=repo.revision, timeout=timeout_s, files_metadata=True
        )
    except Exception as error:
        raise explain_hub_error(repo, error) from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    names = list(filter_repo_objects(sizes, allow_patterns=FILES, ignore_patterns=NOT_NEEDED))
    return HubListing(len(names), sum(sizes[name] for name in names))


def download_snapshot(
    repo: HubRepo, patterns: list[str], progress: DownloadProgress, stalled_s: float = STALLED_S
) -> Path:
    """Fetch the missing files. Raises StartupError, also after ``stalled_s`` without progress."""
    from huggingface_hub import snapshot_download

    done: queue.SimpleQueue[Path | Exception] = queue.SimpleQueue()
    meter = _Meter()

    def work() -> None:
        try:
            path = snapshot_download(
                repo.id,
                revision=repo.revision,
                allow_patterns=patterns,
                ignore_patterns=NOT_NEEDED,
                tqdm_class=meter.bar(),
            )
            done.put(Path(path))
        except Exception as error:
            done.put(error)

    threading.Thread(target=work, daemon=True, name="download").start()
    while True:
        try:
            result = done.get(timeout=_POLL_S)
        except queue.Empty:
            progress(meter.done, meter.total)
            if meter.idle_s() > stalled_s:
                raise StartupError(
                    f"model {str(repo)!r}: the hub has sent nothing for {stalled_s:.0f} s; what"
                    " is there is kept, try again"
                ) from None
            continue
        if isinstance(result, Exception):
            raise explain_hub_error(repo, result) from result
        return result


class _Meter:
    """Sums the counts that the progress bars of one download would show."""

    def __init__(self) -> None:
        self.done = self.total = 0
        self._changed = time.monotonic()
        self._lock = threading.Lock()

    def idle_s(self) -> float:
        return time.monotonic() - self._changed

    def _count(self, nbytes: int, total: int, *, written: bool) -> None:
        with self._lock:
            self._changed = time.monotonic()
            if written:
                self.done += nbytes
                self.total = max(self.total, total)

    def bar(self) -> type[Any]:
        """Return a class of progress bars that show nothing and count here."""
        from tqdm import tqdm  # type: ignore[import-untyped]

        meter = self

        class Bar(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                # One bar counts bytes received, one bytes written, one files.
                self._written = str(kwargs.get("desc", "")).startswith("Reconstructing")
                kwargs.pop("name", None)
                super().__init__(*args, **{**kwargs, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                meter._count(int(n or 0), int(self.total or 0), written=self._written)
                return None

        return Bar


def explain_hub_error(repo: HubRepo, error: Exception) -> StartupError:
    """Return a StartupError that says what to do about an error of the hub."""
    from huggingface_hub import errors as e

    name = f"model {str(repo)!r}"
    if isinstance(error, e.GatedRepoError):
        text = (
            f"{name} is gated: accept its terms at https://huggingface.co/{repo.id}, and set"
            " HF_TOKEN to a token of that account"
        )
    elif isinstance(error, e.RepositoryNotFoundError):
        text = f"{name} is not on the hub, or private: check its name, or set HF_TOKEN"
    elif isinstance(error, e.RevisionNotFoundError):
        text = f"{name}: the hub has the model, but no revision {repo.revision!r}"
    elif isinstance(error, e.HFValidationError):
        text = f"{name} is no valid hub id: expected owner/name or owner/name@revision"
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        text = f"{name}: no space left on the disk of {cache_folder()}; HF_HOME moves the cache"
    elif _is_offline(error):
        text = (
            f"{name} is not in the local cache and the hub cannot be reached; "
            "give a folder with --model instead, or go online"
        )
    else:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        text = f"{name} cannot be fetched from the hub: {reason}"
    return StartupError(text)


def _is_offline(error: Exception) -> bool:
    import httpx2
    from huggingface_hub import errors as e

    kinds = (e.LocalEntryNotFoundError, e.OfflineModeIsEnabled, httpx2.TransportError)
    return isinstance(error, kinds)
