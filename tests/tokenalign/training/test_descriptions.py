"""The descriptions of the public data sets' labels that a recipe trains on."""

import re
from pathlib import Path

import pytest

from tokenalign.training.data import read_banking77, read_clinc150, read_clinc150_domains
from tokenalign.training.descriptions import own_descriptions
from tokenalign.training.recipes import TRANSFER_RECIPE

pytestmark = pytest.mark.data


def words(text: str) -> str:
    """The text as a reader would call it the same: letters and digits alone."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def test_every_label_is_described(data_root: Path) -> None:
    """The descriptions are of the two data sets' labels, all of them, and the recipe draws each."""
    banking77 = read_banking77(data_root / "banking77")
    of_domain = read_clinc150_domains(data_root / "clinc150")
    assert own_descriptions().keys() == {*banking77.labels, *(name for names in of_domain.values() for name in names)}
    assert max(map(len, own_descriptions().values())) == len(TRANSFER_RECIPE.wordings) - 1


def test_no_description_is_a_held_out_message(data_root: Path) -> None:
    """None reads like a validation or test message, whatever its label."""
    banking77 = read_banking77(data_root / "banking77")
    clinc150 = read_clinc150(data_root / "clinc150", read_clinc150_domains(data_root / "clinc150"))
    held_out = [*banking77.examples["test"], *clinc150.examples["val"], *clinc150.examples["test"]]
    texts = {words(example.text) for example in held_out}
    assert not [text for found in own_descriptions().values() for text in found if words(text) in texts]
