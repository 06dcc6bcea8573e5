"""manifest.json: which files a model was made of, by which steps, and the hash of every file that came out."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenalign import __version__
from tokenalign.config import read_json
from tokenalign.errors import CompressionError
from tokenalign.references import sha256_of

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")


def file_hashes(folder: Path) -> dict[str, str]:
    """The sha256 of every file below `folder`, by its path there, the manifest itself and hidden files left out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder): path for path in files}
    return {
        name.as_posix(): sha256_of(path)
        for name, path in names.items()
        if name.as_posix() != MANIFEST_FILE and not any(part.startswith(".") for part in name.parts)
    }


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, its hashes checked; None where the folder has none.

    Raises `CompressionError` naming the first file that is missing or was altered.
    """
    path = folder / MANIFEST_FILE
    if not path.exists():
        return None
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        raise CompressionError(f"{path} is no manifest of format_version {FORMAT_VERSION}; remove it or make it again")
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.is_file() or sha256_of(file) != expected:
            raise CompressionError(
                f"{file} is not the file that {path} names: it was altered or is missing; make the folder again"
            )
    return manifest


def write_manifest(
    folder: Path,
    step: str,
    sources: Mapping[str, Path],
    facts: Mapping[str, Any],
    *,
    before: Path,
    references: Mapping[str, Mapping[str, str | None]] | None = None,
) -> None:
    """Write the manifest of a folder whose other files are complete.

    sources: folders and files that the step read, by the part that they play; before: the one of them whose own steps
    came first; references: what the caller named them by
    """
    earlier = read_manifest(before)
    record: dict[str, Any] = {
        "step": step,
        "sources": {
            role: dict((references or {}).get(role, {}))
            | {"files": file_hashes(path) if path.is_dir() else {path.name: sha256_of(path)}}
            for role, path in sources.items()
        },
        **facts,
        "versions": {"tokenalign": __version__} | {name: version(name) for name in _PACKAGES},
    }
    manifest = {
        "format_version": FORMAT_VERSION,
        "steps": [*(earlier["steps"] if earlier else []), record],
        "files": file_hashes(folder),
    }
    text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")
