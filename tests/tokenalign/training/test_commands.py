"""The commands as they are typed."""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tokenalign.config import ModelConfig
from tokenalign.errors import InputError, TrainingError
from tokenalign.training import calibrate_command, evaluate_command, train_command
from tokenalign.training.assessment import AssessOptions
from tokenalign.training.calibrate_command import add_calibrate_parser
from tokenalign.training.evaluate_command import add_evaluate_parser
from tokenalign.training.material import Sources
from tokenalign.training.recipes import RECIPES, Recipe, recipe_named
from tokenalign.training.run import RunOptions
from tokenalign.training.train_command import add_train_parser

Run = Callable[..., int]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
    card_like: Recipe,
    small_sources: Sources,
    small_data: Path,
    bert_backbone: Path,
    feature_dir: Path,
) -> Run:
    """Runs a command line on the small data and gives its exit code."""
    monkeypatch.setitem(RECIPES, card_like.name, card_like)
    small = (("width", 32), ("ffn_width", 64))
    monkeypatch.setattr(train_command, "RunOptions", partial(RunOptions, sources=small_sources, head_shape=small))
    for command in (evaluate_command, calibrate_command):
        monkeypatch.setattr(command, "AssessOptions", partial(AssessOptions, sources=small_sources))

    def call(command: str, *words: str) -> int:
        parser = argparse.ArgumentParser()
        subparsers = parser.add_subparsers()
        add_train_parser(subparsers)
        add_evaluate_parser(subparsers)
        add_calibrate_parser(subparsers)
        shared = ["--data-dir", str(small_data), "--device", "cpu", "--local-only"]
        if command == "train":
            shared += ["--feature-dir", str(feature_dir), "--backbone", str(bert_backbone)]
        options = parser.parse_args([command, *words, *shared])
        code: int = options.run(options)
        return code

    return call


def test_train_then_evaluate(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A head is trained with a line per epoch, then measured in a table beside the baselines and in a JSON file."""
    head, report = tmp_path / "head", tmp_path / "report.json"
    assert run("train", "--recipe", "card-like", "--output", str(head)) == 0
    out, err = capsys.readouterr()
    assert "validation accuracy" in out
    for epoch in (1, 2, 3):
        assert f"epoch {epoch}: loss " in err
    assert run("evaluate", "--model", str(head), "--output", str(report), "--per-class") == 0
    out, _ = capsys.readouterr()
    for words in ("unseen: 6 messages, 2 labels", "all: 24 messages, 8 labels", "this head", "cosine, raw labels"):
        assert words in out
    assert "Matches: best minus median similarity" in out
    assert out.count("card_declined") >= 1
    saved = json.loads(report.read_text())
    assert saved["results"]["all"]["model"]["classes"] == 8
    assert len(saved["results"]["all"]["model"]["per_class"]) == 8


def test_calibrate_rewrites_the_configuration(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A head without independent scores has them afterwards; scale, bias and the figures they reach are printed."""
    head = tmp_path / "head"
    assert run("train", "--recipe", "card-like", "--output", str(head)) == 0
    config = ModelConfig.load(head / "config.json")
    config.model_copy(update={"multi_label": None}).save(head / "config.json")
    capsys.readouterr()
    assert run("calibrate", str(head)) == 0
    fitted = ModelConfig.load(head / "config.json").multi_label
    assert fitted is not None
    out = capsys.readouterr().out
    assert f"multi_label scale {fitted.scale:.4f}, bias {fitted.bias:.4f}" in out
    assert "validation_calibrate: " in out


def test_errors_are_the_librarys(run: Run, tmp_path: Path) -> None:
    """What goes wrong is raised as an error of ours, before any work."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(TrainingError, match="exists and is not empty"):
        run("train", "--recipe", "card-like", "--output", str(tmp_path / "full"))
    with pytest.raises(InputError, match=r"output: folder .*gone does not exist"):
        run("evaluate", "--output", str(tmp_path / "gone" / "report.json"))


@pytest.mark.parametrize("words", [("--recipe", "unknown"), ("--recipe", "card-like", "--seed", "-1")])
def test_bad_options_end_with_usage(
    run: Run, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown recipe or a negative seed is argparse's own error, with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        run("train", *words, "--output", str(tmp_path / "head"))
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_recipes_by_name() -> None:
    """The card's recipe is the card's: its figures are written out here once more."""
    card = recipe_named("banking77")
    assert (card.learning_rate, card.weight_decay, card.batch_size, card.clip_norm) == (3e-4, 0.01, 32, 1.0)
    assert (card.patience, card.max_epochs, card.label_groups) == (8, 50, (50, 12, 15))
    assert (card.start, card.schedule, card.candidates, card.clinc150_domains) == ("random", "constant", None, ())
    with pytest.raises(TrainingError, match="recipe 'other' is unknown; choose one of banking77, intents"):
        recipe_named("other")
