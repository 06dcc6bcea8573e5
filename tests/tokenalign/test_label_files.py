"""Files with labels: plain lines, JSON lines, and errors that name file and line."""

from pathlib import Path
from typing import Any

import pytest

from tokenalign.errors import ConfigError
from tokenalign.label_files import LabelFile


class TestLabelFiles:
    def read(self, folder: Path, text: str | bytes) -> LabelFile:
        path = folder / "labels.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return LabelFile.read(path)

    def test_one_label_a_line(self, tmp_path: Path) -> None:
        """Lines are labels as they stand, whatever is in them; empty lines and white space at the ends don't count."""
        file = self.read(tmp_path, "\ufeffcard payment\r\n\n  a, b  \n# tag\n\u2028x\u2028y\n'quoted'")
        assert file.labels == ("card payment", "a, b", "# tag", "x\u2028y", "'quoted'")
        assert file.lines == (1, 3, 4, 5, 6)

    def test_json_lines(self, tmp_path: Path) -> None:
        """Where a label has descriptions, its line is a JSON object; both kinds may stand in one file."""
        file = self.read(tmp_path, '{"name": "a", "description": ["b", "c"]}\nplain\n {"name": "{odd"}\n')
        assert file.labels == ({"name": "a", "description": ["b", "c"]}, "plain", {"name": "{odd"})

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (b"", r"labels.txt has no labels; write one a line"),
            (b" \n\t\n", "has no labels"),
            (b"a\n{b\n", r"labels.txt:2: begins with \{ but is no JSON object.*or the label as a name"),
            (b'{"name": "a"} b\n', "labels.txt:1: begins with"),
            (b"caf\xe9\n", "byte 3 is no UTF-8; save the file as UTF-8"),
            (b'{"a":' * 100_000, "labels.txt:1: begins with"),
        ],
    )
    def test_errors_name_the_line(self, tmp_path: Path, text: bytes, words: str) -> None:
        """What can't be read is said with file and line."""
        with pytest.raises(ConfigError, match=words):
            self.read(tmp_path, text)

    def test_no_file(self, tmp_path: Path) -> None:
        """A path that isn't there is named."""
        with pytest.raises(ConfigError, match=r"nowhere.txt can't be read: No such file"):
            LabelFile.read(tmp_path / "nowhere.txt")

    @pytest.mark.parametrize(
        ("loc", "place"), [(("labels", 1), ":3"), (("labels", 1, "name"), ":3"), (("labels",), ""), (("labels", 9), "")]
    )
    def test_places(self, tmp_path: Path, loc: Any, place: str) -> None:
        """The place within a request becomes a line of the file."""
        file = self.read(tmp_path, "a\n\nb")
        assert file.place(loc) == f"{tmp_path / 'labels.txt'}{place}"
