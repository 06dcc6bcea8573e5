"""API keys: known by their hashes, several to a name, followed while their file changes."""

import hashlib
import logging
import re
from pathlib import Path

import pytest

from deploy.http.keys import CHECK_PERIOD_S, KEY_PREFIX, KeyRing, hash_of, new_key
from tokenalign.errors import ConfigError

ANNA, BERT, CARL = "key-of-anna", "key-of-bert", "key-of-carl"


class Clock:
    """Time that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_a_period(self) -> None:
        self.now += CHECK_PERIOD_S


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with Anna's key."""
    path = tmp_path / "keys"
    path.write_text(f"# who may ask\n\nanna {hash_of(ANNA)}\n")
    return path


def test_new_keys_are_random_and_long() -> None:
    """No two are equal; each has 256 bits after a prefix by which it is known for a key."""
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(rf"{KEY_PREFIX}[A-Za-z0-9_-]{{43}}", key) for key in keys)


def test_a_hash_is_sha256() -> None:
    """What other tools make of a key is good here too."""
    assert hash_of(ANNA) == hashlib.sha256(ANNA.encode()).hexdigest()


def test_names_of_keys(file: Path) -> None:
    """Keys of settings and of the file count together, several of one name too; everything else has no name."""
    ring = KeyRing({"bert": (hash_of(BERT), hash_of(CARL))}, file)
    assert [ring.name_of(key) for key in (ANNA, BERT, CARL)] == ["anna", "bert", "bert"]
    assert ring.names == {"anna", "bert"}
    for wrong in ("", ANNA[:-1], ANNA + "x", ANNA.upper(), hash_of(ANNA), "anna", "\xe9", "\u20ac"):
        assert ring.name_of(wrong) is None


def test_a_changed_file_is_followed(file: Path, clock: Clock) -> None:
    """After the period, and not before, new keys are good and those that are gone are not."""
    ring = KeyRing({}, file, clock=clock)
    file.write_text(f"bert {hash_of(BERT)}\nbert {hash_of(CARL)}\n")
    assert ring.name_of(ANNA) == "anna"
    clock.pass_a_period()
    assert ring.name_of(ANNA) is None
    assert [ring.name_of(key) for key in (BERT, CARL)] == ["bert", "bert"]


def test_a_replaced_file_is_followed(file: Path, clock: Clock) -> None:
    """A link that comes to point elsewhere, as Kubernetes changes mounted Secrets, is a change."""
    link = file.parent / "link"
    link.symlink_to(file)
    ring = KeyRing({}, link, clock=clock)
    other = file.parent / "other"
    other.write_text(file.read_text().replace(hash_of(ANNA), hash_of(BERT)))
    link.unlink()
    link.symlink_to(other)
    clock.pass_a_period()
    assert [ring.name_of(key) for key in (ANNA, BERT)] == [None, "anna"]


@pytest.mark.parametrize("content", [None, "", "# nobody\n", f"{ANNA}\n", "anna 12ab\n"])
def test_a_file_that_became_wrong_changes_nothing(
    file: Path, clock: Clock, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The keys stay as they were until it is right again; it is said once, without a word of the file."""
    ring = KeyRing({}, file, clock=clock)
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    for _ in range(3):
        clock.pass_a_period()
        assert ring.name_of(ANNA) == "anna"
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert ANNA not in caplog.text
    file.write_text(f"bert {hash_of(BERT)}\n# right again\n")
    clock.pass_a_period()
    assert ring.name_of(BERT) == "bert"
    assert ring.name_of(ANNA) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "can't be read"),
        (b"\xff", "can't be read"),
        (b"", "has no keys"),
        (b"anna " + b"0" * 63, "line 1: must be a name and 64"),
        (b"# x\n" + b"0" * 64, "line 2: must be"),
        (b"anna " + b"F" * 64, "line 1: must be"),
        (ANNA.encode(), "line 1: must be"),
    ],
)
def test_a_wrong_file_at_the_start(tmp_path: Path, content: bytes | None, words: str) -> None:
    """Nothing starts with it: the error names setting, file and line, and repeats nothing of it."""
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        KeyRing({}, path)
    assert f"access.keys_file: {path}" in str(caught.value)
    assert ANNA not in str(caught.value)
