"""Data sets as examples."""

import json
import shutil
from pathlib import Path

import pytest

from tokenalign.errors import DataError
from tokenalign.training.data import (
    BANKING_DOMAINS,
    Example,
    label_words,
    normalised,
    read_banking77,
    read_clinc150,
    read_clinc150_domains,
)
from tokenalign.training.sources import BANKING77, CLINC150, ensure_files


def test_banking77_rows(small_data: Path) -> None:
    """Rows come in file order, with the labels as they are written."""
    corpus = read_banking77(small_data / "banking77")
    assert len(corpus.labels) == 8
    assert len(corpus.examples["train"]) == 80
    assert corpus.examples["test"][0] == Example("why is my card was declined a", "card_declined")


def test_clinc150_domains(small_data: Path) -> None:
    """Only the intents of the domains asked for are read, and never out-of-scope queries."""
    corpus = read_clinc150(small_data / "clinc150", ["home"])
    assert corpus.labels == ("play_song", "set_alarm")
    assert {example.label for rows in corpus.examples.values() for example in rows} == set(corpus.labels)
    assert [len(corpus.examples[name]) for name in ("train", "val", "test")] == [8, 8, 8]


def test_unknown_domain(small_data: Path) -> None:
    """A domain that does not exist is an error that lists those that do."""
    with pytest.raises(DataError, match=r"no domains \['space'\]; it has \['banking', 'home', 'travel'\]"):
        read_clinc150(small_data / "clinc150", ["space"])


@pytest.mark.parametrize("row", ["no label,", ",card_declined", "text,loan_declined_never"])
def test_broken_rows_are_named(small_data: Path, tmp_path: Path, row: str) -> None:
    """A row without a text or a known label is an error with file and row."""
    folder = tmp_path / "banking77"
    shutil.copytree(small_data / "banking77", folder)
    (folder / "test.csv").write_text(f"text,category\nfine,card_declined\n{row}\n")
    with pytest.raises(DataError, match=r"test\.csv, row 2"):
        read_banking77(folder)


def test_broken_lists_are_named(small_data: Path, tmp_path: Path) -> None:
    """Files of another shape are errors that name the file."""
    folder = tmp_path / "clinc150"
    shutil.copytree(small_data / "clinc150", folder)
    (folder / "data_full.json").write_text(json.dumps({"train": []}))
    with pytest.raises(DataError, match=r"data_full\.json has no list 'val'"):
        read_clinc150(folder, ["home"])
    (folder / "domains.json").write_text(json.dumps({"home": [1]}))
    with pytest.raises(DataError, match=r"domains\.json must hold lists of names"):
        read_clinc150_domains(folder)


def test_words_and_duplicates() -> None:
    """Label names become words, and texts are compared without case and white space."""
    assert label_words("reverted_card_payment?") == "reverted card payment?"
    assert normalised(" My\tCARD \n ") == normalised("my card")


def test_example_digests_do_not_collide() -> None:
    """The same characters divided otherwise between text and label hash otherwise."""
    assert Example("ab", "c").digest != Example("a", "bc").digest
    assert Example("ab", "c").digest == Example("ab", "c").digest


@pytest.mark.data
def test_real_sizes(data_root: Path) -> None:
    """The real data sets have the sizes that their authors state."""
    banking77 = read_banking77(ensure_files(BANKING77, data_root, local_only=True))
    assert len(banking77.labels) == 77
    assert {name: len(rows) for name, rows in banking77.examples.items()} == {"train": 10_003, "test": 3_080}
    folder = ensure_files(CLINC150, data_root, local_only=True)
    domains = read_clinc150_domains(folder)
    assert domains.keys() > BANKING_DOMAINS
    clinc150 = read_clinc150(folder, domains)
    assert len(clinc150.labels) == 150
    sizes = {name: len(rows) for name, rows in clinc150.examples.items()}
    assert sizes == {"train": 15_000, "val": 3_000, "test": 4_500}
