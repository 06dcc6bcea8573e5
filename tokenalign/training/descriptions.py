"""Other ways to say what a label of Banking77 or CLINC150 stands for, written for this project.

None of them is taken from a data set, and none reads like one of its validation or test messages.
"""

from pathlib import Path

from tokenalign.config import read_json

FILE = Path(__file__).with_name("descriptions.json")


def own_descriptions() -> dict[str, tuple[str, ...]]:
    """Label -> up to four descriptions of it, its name not among them."""
    return {label: tuple(found) for label, found in read_json(FILE).items()}
