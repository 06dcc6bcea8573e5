"""The exception family: one base, locations that read as paths, and errors that survive a process boundary."""

import pickle

import pytest

from tokenalign import errors
from tokenalign.errors import FingerprintMismatchError, InputError, TokenAlignError


@pytest.mark.parametrize(
    "name",
    ["InputError", "ConfigError", "CheckpointError", "BackboneError", "NumericalError", "FingerprintMismatchError"],
)
def test_one_except_catches_every_error(name: str) -> None:
    """Every error of ours derives from TokenAlignError."""
    assert issubclass(getattr(errors, name), TokenAlignError)


@pytest.mark.parametrize(
    ("loc", "text"),
    [
        ((), "is empty"),
        (("text",), "text: is empty"),
        (("texts", 3), "texts[3]: is empty"),
        (("labels", 2, "description", 0), "labels[2].description[0]: is empty"),
        ((0, "name"), "[0].name: is empty"),
    ],
)
def test_location_reads_as_a_path(loc: tuple[str | int, ...], text: str) -> None:
    """The message begins with where the value stood."""
    assert str(InputError("is empty", loc)) == text


def test_at_moves_the_location_below_a_prefix() -> None:
    """`at` keeps message and class, and puts the prefix before the location."""
    moved = InputError("is empty", ("labels", 1)).at("body", 0)
    assert (moved.message, moved.loc, type(moved)) == ("is empty", ("body", 0, "labels", 1), InputError)


def test_input_error_is_a_value_error() -> None:
    """Callers that know only Python's own errors catch ours as ValueError."""
    with pytest.raises(ValueError, match="top_k"):
        raise InputError("must be positive", ("top_k",))


@pytest.mark.parametrize("error", [InputError("is empty", ("texts", 3)), FingerprintMismatchError("rows", "aa", "bb")])
def test_errors_survive_pickling(error: TokenAlignError) -> None:
    """An error that crosses a process says the same on the other side."""
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_fingerprint_mismatch_names_both_models() -> None:
    """A mismatch says what came, from which model, and which one is held."""
    message = str(FingerprintMismatchError("label rows", "held", "sent"))
    assert "label rows" in message
    assert "model sent" in message
    assert "holds held" in message
