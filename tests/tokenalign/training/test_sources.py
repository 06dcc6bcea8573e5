"""The files of data sets: found, checked, downloaded."""

from dataclasses import replace
from pathlib import Path

import pytest

from tokenalign.errors import DataError
from tokenalign.training.material import PUBLIC_SOURCES, Sources
from tokenalign.training.sources import BANKING77, CLINC150, ensure_files


def test_present_files_are_checked(small_data: Path, small_sources: Sources) -> None:
    """The folder with whole files is given back, without a download."""
    assert ensure_files(small_sources.banking77, small_data, local_only=True) == small_data / "banking77"


def test_missing_files_are_downloaded_once(small_sources: Sources, tmp_path: Path) -> None:
    """A missing file is fetched from its address, checked, and no half of it is left beside it."""
    folder = ensure_files(small_sources.clinc150, tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["data_full.json", "domains.json"]
    assert ensure_files(small_sources.clinc150, tmp_path, local_only=True) == folder


def test_missing_files_without_downloads(small_sources: Sources, tmp_path: Path) -> None:
    """With downloads off, the error names the file and what to put there."""
    with pytest.raises(DataError, match=r"data_full\.json is missing and downloads are off.*--data-dir"):
        ensure_files(small_sources.clinc150, tmp_path, local_only=True)


def test_altered_files_are_refused(small_sources: Sources, tmp_path: Path) -> None:
    """A changed byte is an error with both hashes, and so is a download that is not the file."""
    folder = ensure_files(small_sources.banking77, tmp_path)
    with (folder / "test.csv").open("a") as file:
        file.write(" ")
    with pytest.raises(DataError, match=r"test\.csv has sha256 \w{64}, but \w{64} was expected"):
        ensure_files(small_sources.banking77, tmp_path)


def test_failed_downloads(small_sources: Sources, tmp_path: Path) -> None:
    """An address that can't be reached is an error that names it, and leaves no file."""
    gone = replace(small_sources.clinc150.files[0], url=(tmp_path / "gone.json").as_uri())
    with pytest.raises(DataError, match=r"gone\.json can't be downloaded"):
        ensure_files(replace(small_sources.clinc150, files=(gone,)), tmp_path / "data")
    assert list((tmp_path / "data" / "clinc150").iterdir()) == []


def test_public_addresses_are_pinned() -> None:
    """Every public file is fetched over https, at the data set's revision."""
    for source in (PUBLIC_SOURCES.banking77, PUBLIC_SOURCES.clinc150):
        assert len(source.revision) == 40
        for file in source.files:
            assert file.url.startswith("https://raw.githubusercontent.com/")
            assert source.revision in file.url


@pytest.mark.data
def test_real_files_hash_as_pinned(data_root: Path) -> None:
    """The real data sets are the pinned ones, byte by byte."""
    for source in (BANKING77, CLINC150):
        assert ensure_files(source, data_root, local_only=True) == data_root / source.name
