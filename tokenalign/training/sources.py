"""The files of the public data sets: pinned by revision and sha256, found in a folder or downloaded into it."""

import os
import shutil
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tokenalign.errors import DataError
from tokenalign.references import sha256_of

DOWNLOAD_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a data set.

    name: its name in the data set's own folder
    url: where it is downloaded from, the revision within it
    sha256: what it must hash to
    """

    name: str
    url: str
    sha256: str


@dataclass(frozen=True, slots=True)
class DataSource:
    """A data set at one revision; its files lie in the folder `name` of the data folder."""

    name: str
    repository: str
    revision: str
    licence: str
    files: tuple[SourceFile, ...]

    def provenance(self) -> dict[str, object]:
        """What a trained head keeps of it: where it came from and what its files hashed to."""
        return {
            "repository": self.repository,
            "revision": self.revision,
            "licence": self.licence,
            "sha256": {file.name: file.sha256 for file in self.files},
        }


def _of_github(repository: str, revision: str, folder: str, files: dict[str, str]) -> tuple[SourceFile, ...]:
    base = f"https://raw.githubusercontent.com/{repository}/{revision}/{folder}"
    return tuple(SourceFile(name, f"{base}/{name}", sha256) for name, sha256 in files.items())


_BANKING77_REPOSITORY, _BANKING77_REVISION = (
    "PolyAI-LDN/task-specific-datasets",
    "57ec275d8078af65b7731c2a98be812d844a6d6b",
)
BANKING77 = DataSource(
    name="banking77",
    repository=_BANKING77_REPOSITORY,
    revision=_BANKING77_REVISION,
    licence="CC-BY-4.0",
    files=_of_github(
        _BANKING77_REPOSITORY,
        _BANKING77_REVISION,
        "banking_data",
        {
            "train.csv": "b06e26ac675513959a63135f11b94ea7786ed02da65db93a5650d8838cbc664b",
            "test.csv": "d12d6e3bc4c3103966ae786dc435913c0c563dfa328f5a3646d0e62cfeeb474d",
            "categories.json": "53261da888122daf2d120d925458631d9619e15d82e56052e7a42e535ce32b63",
        },
    ),
)

_CLINC150_REPOSITORY, _CLINC150_REVISION = "clinc/oos-eval", "828f8093932c8fe6ca7936c3d2e52903b1c523de"
CLINC150 = DataSource(
    name="clinc150",
    repository=_CLINC150_REPOSITORY,
    revision=_CLINC150_REVISION,
    licence="CC-BY-3.0",
    files=_of_github(
        _CLINC150_REPOSITORY,
        _CLINC150_REVISION,
        "data",
        {
            "data_full.json": "36923c3705a59e08fe9c3883d8bc2dd966ef93e22cb78ac41171782a698d56e0",
            "domains.json": "b947b579d3b8e74b06f93b01083d8efaff2888b43a3e362533bd88a6e1211b3a",
        },
    ),
)


def ensure_files(source: DataSource, data_dir: Path, *, local_only: bool = False) -> Path:
    """The folder below `data_dir` that holds the source's files, each checked against its hash.

    A missing file is downloaded, unless `local_only`. Raises `DataError` naming the file that is missing, altered or
    can't be had.
    """
    folder = data_dir / source.name
    for file in source.files:
        path = folder / file.name
        if not path.exists():
            if local_only:
                raise DataError(
                    f"{path} is missing and downloads are off; put {source.repository} at revision {source.revision} "
                    f"there, give its folder with --data-dir, or allow the download"
                )
            _download(file, path)
        got = sha256_of(path)
        if got != file.sha256:
            raise DataError(
                f"{path} has sha256 {got}, but {file.sha256} was expected of {source.name} at revision "
                f"{source.revision}: it was altered or is of another release; delete it to have it downloaded again"
            )
    return folder


def _download(file: SourceFile, path: Path) -> None:
    """Fetch a file so that `path` exists only once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        # Only addresses written in this module (or by a test) come here.
        with urllib.request.urlopen(file.url, timeout=DOWNLOAD_TIMEOUT_S) as response, partial.open("wb") as out:  # noqa: S310
            shutil.copyfileobj(response, out)
        partial.replace(path)
    except OSError as error:
        raise DataError(
            f"{file.url} can't be downloaded: {error}; check the network, or put the file at {path} yourself"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
