"""Whether what a user names as a model is a linear head."""

import os
from pathlib import Path

from tokenalign.linear.config import is_linear


def names_linear(
    id_or_path: str | os.PathLike[str] | None,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> bool:
    """Whether a folder, hub id or shipped name is that of a linear head; of a hub id the head is fetched for that.

    Raises `CheckpointError` when it is none of them or can't be fetched.
    """
    if id_or_path is None:
        return False
    folder = Path(id_or_path).expanduser()
    if not folder.is_dir():
        from tokenalign.weights import locate_head  # imports torch, which a folder doesn't need

        folder = locate_head(id_or_path, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only)
    return is_linear(folder)
