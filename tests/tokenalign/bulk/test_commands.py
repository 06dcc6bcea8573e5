"""The command: exit codes, words on stderr, and a process that is killed in the middle."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.cli import main

PATIENCE_S = 120.0  # of the machine, not a promise
Command = Callable[..., list[str]]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A file of texts and one of labels."""
    (tmp_path / "labels.txt").write_text('card payment\n{"name": "cash", "description": "cash declined"}\n')
    path = tmp_path / "in.csv"
    path.write_text("id,text\n" + "".join(f"{i},card was charged {i} times\n" for i in range(20)))
    return path


@pytest.fixture
def command(texts: Path, bert_head: Path, tmp_path: Path) -> Command:
    """The words of a run on the tiny model."""

    def words(*more: str, source: Path | str = texts) -> list[str]:
        files = [str(source), str(tmp_path / "out.jsonl"), "--labels-file", str(tmp_path / "labels.txt")]
        return ["batch", *files, "--model", str(bert_head), "--device", "cpu", "--local-only", *more]

    return words


def test_answers_are_the_librarys(
    command: Command, tmp_path: Path, bert_classifier: TokenAlignClassifier, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0, nothing on stdout, and the numbers of a call in Python."""
    assert main(command("--id-column", "id", "--top-k", "all", "--explain", "all")) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"20 rows answered: {tmp_path / 'out.jsonl'}\n"
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    labels = ["card payment", {"name": "cash", "description": "cash declined"}]
    expected: list[Any] = bert_classifier([f"card was charged {i} times" for i in range(20)], labels, explain="all")
    for i, (line, answer) in enumerate(zip(lines, expected, strict=True)):
        del answer["warnings"]
        assert line == {"row": i, "id": str(i), **answer}


def test_tabs(command: Command, texts: Path, tmp_path: Path) -> None:
    """A .tsv file is read as its name says."""
    path = tmp_path / "in.tsv"
    path.write_text(texts.read_text().replace(",", "\t"))
    assert main(command(source=path)) == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 20


def test_bad_rows_have_an_exit_code(command: Command, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3, and the side file is named."""
    with texts.open("a") as file:
        file.write("20,\n")
    assert main(command()) == 3
    side = texts.parent / "out.errors.jsonl"
    assert f"20 rows answered: {texts.parent / 'out.jsonl'}; 1 bad rows: {side}" in capsys.readouterr().err
    assert json.loads(side.read_text()) == {
        "row": 20,
        "reason": "text: is empty or only white space; a text needs at least one visible character",
        "raw": "20,\n",
    }


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--text-column", "body"], "has no column 'body'; its header is 'id', 'text'"),
        (["--top-k", "0"], "top_k: must be a whole number"),
        (["--top-k", "-1"], "top-k: must be a whole number of at least 1, or all"),
        (["--max-batch-tokens", "0"], "max-batch-tokens: is 0; give at least 1"),
        (["--format", "parquet"], "is no Parquet file"),
        (["--labels-file", "nowhere.txt"], "nowhere.txt can't be read"),
        (["--model", "./missing"], "model './missing' is no folder here"),
    ],
)
def test_errors_are_one_line(command: Command, more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line that says what is wrong."""
    assert main(command(*more)) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_labels_are_checked(command: Command, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the line that they stand in."""
    (texts.parent / "labels.txt").write_text("card\n\ncard\n")
    assert main(command()) == 2
    assert "labels.txt:3: labels[1]: 'card' is the same label as number 0" in capsys.readouterr().err


def test_ctrl_c(
    command: Command, texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """130, with the way to go on."""

    def interrupt(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(TokenAlignClassifier, "__call__", interrupt)
        assert main(command()) == 130
    assert "stopped after 0 rows; the same command goes on from there" in capsys.readouterr().err
    assert main(command()) == 0
    assert "going on with the unfinished run of" in capsys.readouterr().err


def test_standard_input(command: Command, tmp_path: Path, bert_head: Path) -> None:
    """`-` reads JSON Lines; there is no progress file, and another format is refused."""
    given = b'{"text": "card"}\n{"text": 3}\n'
    words = [sys.executable, "-m", "tokenalign", *command(source="-")]
    done = subprocess.run(words, input=given, capture_output=True, check=False)
    assert done.returncode == 3, done.stderr
    assert json.loads((tmp_path / "out.jsonl").read_text())["row"] == 0
    assert not (tmp_path / "out.jsonl.progress.json").exists()
    refused = subprocess.run([*words, "--format", "csv", "--overwrite"], input=given, capture_output=True, check=False)
    assert refused.returncode == 2
    assert b"standard input holds JSON Lines" in refused.stderr


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_kill_9_loses_and_doubles_nothing(command: Command, tmp_path: Path, kind: str) -> None:
    """Killed while it writes, then gone on with: the files are, byte for byte, those of one run."""
    rows = 6_000
    path = tmp_path / f"big.{kind}"
    with path.open("w") as file:
        if kind == "csv":
            file.write("text\n")
            file.writelines(f'"card, charged {i}\ntwice"\n' if i % 97 else '"x" y\n' for i in range(rows))
        else:
            file.writelines(json.dumps({"text": f"card charged {i}"}) + "\n" if i % 97 else "{\n" for i in range(rows))
    output, progress = tmp_path / "out.jsonl", tmp_path / "out.jsonl.progress.json"
    words = [sys.executable, "-m", "tokenalign", *command(source=path)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (output.exists() and output.stat().st_size):
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline, "nothing was written"
            time.sleep(0.005)  # a condition of another process, asked for again
    finally:
        process.kill()
        process.wait()
    assert progress.exists(), "it was through before it could be killed"
    assert subprocess.run(words, capture_output=True, check=False).returncode == 3
    stopped = [output.read_bytes(), (tmp_path / "out.errors.jsonl").read_bytes()]
    assert not progress.exists()
    assert subprocess.run([*words, "--overwrite"], capture_output=True, check=False).returncode == 3
    assert [output.read_bytes(), (tmp_path / "out.errors.jsonl").read_bytes()] == stopped
    numbers = [json.loads(line)["row"] for part in stopped for line in part.splitlines()]
    assert sorted(numbers) == list(range(rows))
