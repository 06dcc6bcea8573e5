"""The exception family: every error that tokenalign raises on purpose derives from `TokenAlignError`."""

from collections.abc import Sequence

Loc = tuple[str | int, ...]


class TokenAlignError(Exception):
    """Base of all errors raised on purpose, so that one `except` catches them."""


class InputError(TokenAlignError, ValueError):
    """A text, label or option of the caller's is not acceptable.

    `loc` is the path to the value within what the caller sent, for example `("texts", 3)`.
    """

    def __init__(self, message: str, loc: Sequence[str | int] = ()) -> None:
        super().__init__(message, tuple(loc))
        self.message = message
        self.loc: Loc = tuple(loc)

    def __str__(self) -> str:
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.loc).lstrip(".")
        return f"{path}: {self.message}" if path else self.message

    def at(self, *prefix: str | int) -> "InputError":
        """The same error, its location moved below `prefix`."""
        return type(self)(self.message, (*prefix, *self.loc))


class ConfigError(TokenAlignError, ValueError):
    """A configuration holds an unknown key, or a value out of its bounds."""


class CheckpointError(TokenAlignError):
    """Model files are missing, altered, or do not fit what the configuration says."""


class BackboneError(TokenAlignError):
    """The encoder can't be loaded, or does not behave as late interaction needs it to."""


class NumericalError(TokenAlignError, ArithmeticError):
    """A model gave NaN or infinity where numbers were due; such rows are never scored or cached."""


class DeviceMemoryError(TokenAlignError, MemoryError):
    """The device has no room for even one sequence by itself; nothing of the batch was encoded."""


class FingerprintMismatchError(TokenAlignError):
    """Data from one model version reached a process that holds another one."""

    def __init__(self, what: str, expected: str, got: str) -> None:
        super().__init__(what, expected, got)
        self.what, self.expected, self.got = what, expected, got

    def __str__(self) -> str:
        return (
            f"{self.what} is of model {self.got}, this process holds {self.expected}; a rollout is probably under way"
        )


class DataError(TokenAlignError):
    """A data set is missing, altered, or does not hold what a recipe or a split asks of it."""


class TrainingError(TokenAlignError):
    """A training run can't start, go on, or be resumed as asked."""


class BulkError(TokenAlignError):
    """A bulk run can't start, go on, or be gone on with as asked."""


class CompressionError(TokenAlignError):
    """A model can't be made smaller as asked, or the folder of one was altered."""
