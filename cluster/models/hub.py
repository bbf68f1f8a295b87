"""Models of the Hugging Face hub: the local cache, listings, and what to do about its errors.

Only configs, tokenizers and safetensors are fetched; no code of a repository is ever run.
``download`` fetches files; ``locate``, ``drafting`` and the doctor call this module.
"""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec

from protocol.errors import StartupError

CONFIGS = ["config.json", "generation_config.json"]
TOKENIZER_FILES = [*CONFIGS, "tokenizer*", "*.jinja"]
"""What a router needs of a model."""
FILES = [*TOKENIZER_FILES, "*.safetensors*"]
"""What an engine needs of a model."""
NOT_NEEDED = ["consolidated*", "*/*"]  # copies of the weights in other layouts


class HubRepo(msgspec.Struct, frozen=True):
    """A repository ``owner/name`` at a revision: a branch, a tag or a commit."""

    id: str
    revision: str | None = None

    @property
    def cache_name(self) -> str:
        """Name of the repository's folder in the cache."""
        return f"models--{self.id.replace('/', '--')}"

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


def cached_snapshot(repo: HubRepo, patterns: list[str] = FILES) -> Path | None:
    """Return the snapshot in the local cache; None unless it has all files of ``patterns``."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                repo.id,
                revision=repo.revision,
                allow_patterns=patterns,
                ignore_patterns=NOT_NEEDED,
                local_files_only=True,
            )
        )
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise explain_hub_error(repo, error) from error


def list_files(repo: HubRepo, timeout_s: float, patterns: list[str] = FILES) -> HubListing:
    """List the files on the hub that match ``patterns``.

    Raises StartupError when there is no such model, when this node's token gives no access to a
    gated one, and after the timeout."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils._paths import filter_repo_objects

    check_token()
    try:
        info = HfApi().model_info(
            repo.id, revision=repo.revision, timeout=timeout_s, files_metadata=True
        )
    except Exception as error:
        raise explain_hub_error(repo, error) from error
    if info.gated:  # anybody may list its files
        _check_access(repo)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    names = list(filter_repo_objects(sizes, allow_patterns=patterns, ignore_patterns=NOT_NEEDED))
    return HubListing(len(names), sum(sizes[name] for name in names))


def _check_access(repo: HubRepo) -> None:
    """Raise StartupError if the token of this node gives no access to the gated model."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError

    try:
        HfApi().auth_check(repo.id)
    except GatedRepoError as error:
        raise explain_hub_error(repo, error) from error
    except Exception:  # a mirror of the hub may not have this call; the download will tell
        return


def check_token() -> None:
    """Raise StartupError for a token that no HTTP header can carry, without showing it.

    The HTTP client would show it in its error."""
    from huggingface_hub import get_token

    token = get_token() or ""
    if not all("!" <= character <= "~" for character in token):
        raise StartupError(
            "the token of the hub (HF_TOKEN, or the file that `hf auth login` writes) has blanks or"
            " characters that are not ASCII: set it to the token alone"
        )


def explain_hub_error(repo: HubRepo, error: Exception) -> StartupError:
    """Return a StartupError that says what to do about an error of the hub."""
    from huggingface_hub import errors as e

    name = f"model {str(repo)!r}"
    if isinstance(error, e.GatedRepoError):
        text = (
            f"{name} is gated: accept its terms at https://huggingface.co/{repo.id}, and set"
            " HF_TOKEN to a token of that account (on a cluster of hosts: in each node.env)"
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
