"""`tokenalign compress`, in this process, from a teacher to a head on the result."""

import json
from pathlib import Path

import pytest

from tests.conftest import save_qwen3_tokenizer
from tests.tokenalign.compression.models import FULL, THIN, qwen35_config, save_random
from tokenalign import TokenAlignClassifier
from tokenalign.cli import main

LABELS = ("card_lost", "cash_declined", "fee_charged", "pin_blocked", "loan_late", "rate_wrong")


def compress(*words: str | Path) -> int:
    return main(["compress", *map(str, words)])


def test_count_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The card's four layers and rows, out of config.json of the 24 alone."""
    qwen35_config(24, 248_320, **FULL).save_pretrained(tmp_path)
    assert compress("count", "--model", tmp_path, "--layers", "0,11,13,23", "--rows", "39866") == 0
    out = capsys.readouterr().out
    assert "4 (linear, full, linear, full)" in out
    assert "120,639,808" in out
    assert "241,285,160 bytes (230.1 MiB)" in out
    assert "33.8%" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["count", "--model", "{here}", "--layers", "3,1"], "error: --layers 3,1: must be"),
        (["layers", "--model", "{here}/absent", "--layers", "0", "--output", "{here}/new"], "error: backbone"),
        (["vocabulary", "--model", "{here}", "--top", "-1", "--output", "{here}/new"], "error: --top must be"),
        (
            ["layers", "--model", "{here}", "--layers", "0", "--output", "{here}"],
            "error: {here} exists and is not empty",
        ),
    ],
)
def test_errors_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and what is wrong."""
    qwen35_config(4, 100, **THIN).save_pretrained(tmp_path)
    assert compress(*(word.format(here=tmp_path) for word in words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message.format(here=tmp_path))


@pytest.mark.parametrize(
    "words", [["count", "--model", "x", "--layers", "a,b"], ["count", "--model", "x", "--rows", "0"]]
)
def test_misuse_shows_the_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What no step could read."""
    with pytest.raises(SystemExit, match="2"):
        compress(*words)
    assert "usage: tokenalign compress count" in capsys.readouterr().err


@pytest.mark.data
def test_from_a_teacher_to_a_head(tmp_path: Path, data_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers, distillation, vocabulary, then `train` on the result: the head loads and answers."""
    teacher, kept, student, small, head = (tmp_path / n for n in ("teacher", "kept", "student", "small", "head"))
    teacher.mkdir()
    save_qwen3_tokenizer(data_root, teacher)
    save_random(qwen35_config(6, 151_669, **THIN | {"hidden_size": 16}), teacher)
    texts, data = tmp_path / "texts.jsonl", tmp_path / "data.jsonl"
    rows = [{"text": f"my {name.replace('_', ' ')} {i}", "label": name} for name in LABELS for i in range(4)]
    for path in (texts, data):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert compress("layers", "--model", teacher, "--layers", "0,2,3,5", "--output", kept) == 0
    assert (
        compress(
            *("distil", "--teacher", teacher, "--student", kept, "--text", texts, "--output", student),
            *("--freeze-embedding", "--learning-rate", "1e-3", "--device", "cpu"),
        )
        == 0
    )
    assert compress("vocabulary", "--model", student, "--top", "4096", "--script", "Hangul", "--output", small) == 0
    captured = capsys.readouterr()
    assert "as saved" in captured.out
    assert "script Hangul" in captured.out
    assert "Korean" in captured.out
    steps = json.loads((small / "manifest.json").read_text())["steps"]
    assert [step["step"] for step in steps] == ["layers", "distil", "vocabulary"]

    words = ["train", "--data", str(data), "--backbone", str(small), "--output", str(head), "--max-epochs", "1"]
    assert main([*words, "--device", "cpu", "--feature-dir", str(tmp_path / "features")]) == 0
    answer = TokenAlignClassifier.from_pretrained(head, device="cpu")("my card is lost", ["lost card", "late loan"])
    assert set(answer["scores"]) == {"lost card", "late loan"}
