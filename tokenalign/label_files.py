"""Files with labels: one a line, as a person writes them, or as JSON where a label has descriptions."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenalign.errors import ConfigError, InputError, Loc
from tokenalign.labels import LabelSet


@dataclass(frozen=True, slots=True)
class LabelFile:
    """The labels of a file as a request takes them, unchecked, and for each the line that it stands in."""

    path: Path
    labels: tuple[str | dict[str, Any], ...]
    lines: tuple[int, ...]

    @classmethod
    def read(cls, path: Path) -> "LabelFile":
        """The labels in the UTF-8 text at `path`, in the order of its lines.

        A line that begins with `{` is a JSON object with `name` and `description`, any other is a label as it stands,
        commas and all; white space at its ends and empty lines don't count. Raises `ConfigError` naming the line.
        """
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: byte {error.start} is no UTF-8; save the file as UTF-8") from error
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}; give the path of a file with labels") from error
        # Not splitlines(), to which characters that may stand within a label are ends of lines too.
        numbered = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        if not numbered:
            raise ConfigError(f"{path} has no labels; write one a line")
        labels = tuple(_label(line, f"{path}:{number}") for number, line in numbered)
        return cls(path, labels, tuple(number for number, _ in numbered))

    def label_set(self) -> LabelSet:
        """The labels, validated; `ConfigError` naming the line of one that isn't acceptable."""
        try:
            return LabelSet.of(self.labels)
        except InputError as error:
            raise ConfigError(f"{self.place(error.loc)}: {error}") from error

    def place(self, loc: Loc) -> str:
        """Where in the file the value stands that an error or a warning about `labels` is located at."""
        if len(loc) >= 2 and loc[0] == "labels" and isinstance(loc[1], int) and loc[1] < len(self.lines):
            return f"{self.path}:{self.lines[loc[1]]}"
        return str(self.path)


def _label(line: str, place: str) -> str | dict[str, Any]:
    if not line.startswith("{"):
        return line
    try:
        label = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{place}: begins with {{ but is no JSON object: {error}; "
            'write {"name": "…", "description": "…"}, or the label as a name in one'
        ) from error
    assert isinstance(label, dict)  # noqa: S101  JSON that begins with a brace is nothing else
    return label
