"""From a reference (hub id, folder, `package:NAME`) to files on disk, checked against their hashes."""

import importlib.util
import os
from hashlib import file_digest
from pathlib import Path

from tokenalign.config import BackboneReference
from tokenalign.errors import BackboneError, CheckpointError

PACKAGE_PREFIX = "package:"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"
BACKBONE_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model")


def sha256_of(path: Path) -> str:
    """The hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def check_sha256(path: Path, expected: str | None) -> str:
    """The file's hex sha256; `CheckpointError` when it is missing or differs from `expected`."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the model folder is incomplete, fetch it again")
    got = sha256_of(path)
    if expected is not None and got != expected:
        raise CheckpointError(
            f"{path} has sha256 {got}, but {expected} was expected: the file was altered or is of another release; "
            "fetch it again, or state the hash of the file that you trust"
        )
    return got


def weights_digest_file(folder: Path) -> Path:
    """The file whose hash names a backbone's weights: model.safetensors, or the index of sharded ones."""
    for name in (WEIGHTS_FILE, WEIGHTS_INDEX_FILE):
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(
        f"{folder} has neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE}; only safetensors weights are read"
    )


def local_backbone(reference: str, base: Path | None = None) -> Path | None:
    """The folder that a reference names, looked for below `base` first; None when it names none."""
    for folder in (base / reference if base else None, Path(reference).expanduser()):
        if folder is not None and folder.is_dir():
            return folder
    return None


def resolve_backbone(
    backbone: BackboneReference,
    *,
    base: Path | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Path:
    """The folder that holds the backbone's config, tokenizer and weights, downloaded if it must be.

    A relative folder is looked for below `base` (the head's own folder) first. Raises `BackboneError` when it can't be
    had, with what to do.
    """
    reference = backbone.reference
    if reference.startswith(PACKAGE_PREFIX):
        return _package_folder(reference.removeprefix(PACKAGE_PREFIX))
    if folder := local_backbone(reference, base):
        return folder
    if reference.startswith((".", "/", "~")) or reference.count("/") != 1:
        raise BackboneError(
            f"backbone {reference!r} is no folder here, no hub id (owner/name) and no {PACKAGE_PREFIX}NAME; "
            "correct backbone.reference"
        )
    if backbone.revision is None:
        raise BackboneError(
            f"backbone {reference!r} has no revision; pin backbone.revision to a commit (40 hex digits), "
            "since a moving model would silently change scores"
        )
    return download(reference, backbone.revision, BACKBONE_PATTERNS, cache_dir, local_files_only)


def download(
    repo_id: str,
    revision: str | None,
    patterns: tuple[str, ...],
    cache_dir: str | os.PathLike[str] | None,
    local_files_only: bool,
) -> Path:
    """The folder of a hub repository's snapshot with the files that match `patterns`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=list(patterns),
                cache_dir=None if cache_dir is None else Path(cache_dir),
                local_files_only=local_files_only,
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        how = (
            "it is not in the local cache and downloads are off (local_files_only); allow them once, or give a folder"
            if local_files_only
            else "check the id, the revision and the network, or give a local folder"
        )
        raise BackboneError(f"{repo_id!r} at {revision or 'its newest revision'} can't be fetched: {how}") from error


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise BackboneError(
            f"backbone package {name!r} is not installed; run: pip install {name.replace('_', '-')}, "
            "or point backbone.reference at a folder or a hub id"
        )
    root = Path(spec.submodule_search_locations[0])
    for folder in (root / "model", root):
        if (folder / "config.json").is_file():
            return folder
    raise BackboneError(f"package {name!r} ships no model: no config.json in {root} or its folder model")
