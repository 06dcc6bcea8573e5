"""Whole runs on small data: they learn, repeat, resume, and leave an account of themselves."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.config import BackboneReference, ModelConfig
from tokenalign.errors import TrainingError
from tokenalign.references import sha256_of
from tokenalign.training.checkpoint import CHECKPOINT_FILE
from tokenalign.training.encoder import Encoder
from tokenalign.training.material import Material, Sources
from tokenalign.training.recipes import BANKING_TEMPLATE, Recipe
from tokenalign.training.run import HISTORY_FILE, PARTITIONS_FILE, RunOptions, run_training
from tokenalign.training.trainer import EpochReport, Progress, learning_rate_at, train_head

RunOptionsFor = Callable[..., RunOptions]
FILES = ["config.json", HISTORY_FILE, "model.safetensors", PARTITIONS_FILE]


class Killed(BaseException):
    """Stands for the end of the process."""


def test_a_run_learns_and_repeats(recipe: Recipe, run_options: RunOptionsFor, tmp_path: Path) -> None:
    """Two runs of one seed leave the same bytes, another seed leaves others, and the loss falls."""
    hashes = []
    for name, seed in (("one", 42), ("two", 42), ("three", 7)):
        folder = tmp_path / name
        run_training(run_options(recipe, output=folder, seed=seed))
        assert sorted(path.name for path in folder.iterdir()) == FILES
        hashes.append([sha256_of(folder / file) for file in FILES])
    assert hashes[0] == hashes[1]
    assert hashes[0][2] != hashes[2][2]
    history = json.loads((tmp_path / "one" / HISTORY_FILE).read_text())
    assert history[-1]["loss"] < history[1]["loss"]


@pytest.mark.parametrize("when", ["between epochs", "within an epoch"])
def test_a_killed_run_resumes_to_the_same_bytes(
    recipe: Recipe, when: str, run_options: RunOptionsFor, tmp_path: Path
) -> None:
    """A run that was killed twice and resumed ends bit for bit as one that was not."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_training(run_options(recipe, output=whole))

    def on_epoch(report: EpochReport) -> None:
        if when == "between epochs" and report.epoch == 1:
            raise Killed

    def on_progress(progress: Progress) -> None:
        if when == "within an epoch" and (progress.epoch, progress.batch) == (2, 1):
            raise Killed

    with pytest.raises(Killed):
        run_training(run_options(recipe, output=killed), on_epoch=on_epoch, on_progress=on_progress)
    assert not (killed / "config.json").exists()
    torch.manual_seed(999)  # the process that resumes has other generators
    epochs: list[int] = []
    run_training(run_options(recipe, output=killed, resume=True), on_epoch=lambda report: epochs.append(report.epoch))
    assert epochs == [2, 3]
    assert [sha256_of(killed / file) for file in FILES] == [sha256_of(whole / file) for file in FILES]


def test_the_global_generator_stays_as_it_is(
    everything: Recipe, encoder: Encoder, material: Material, tmp_path: Path
) -> None:
    """Training seeds its own generators and leaves the caller's alone."""
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    train_head(everything, 42, encoder.config, material, device=torch.device("cpu"), folder=tmp_path, run="run")
    assert torch.equal(torch.rand(1), expected)


def test_a_folder_in_use_is_refused(card_like: Recipe, run_options: RunOptionsFor) -> None:
    """A run writes only to a fresh folder, and resumes only what was interrupted."""
    options = run_options(card_like)
    with pytest.raises(TrainingError, match="nothing to resume; leave --resume out"):
        run_training(replace(options, resume=True))
    options.output.mkdir()
    (options.output / "note.txt").write_text("mine")
    with pytest.raises(TrainingError, match="exists and is not empty"):
        run_training(options)
    (options.output / "note.txt").unlink()
    run_training(options)
    with pytest.raises(TrainingError, match="the run in it is finished"):
        run_training(replace(options, resume=True))


def test_other_options_do_not_resume_a_run(card_like: Recipe, run_options: RunOptionsFor) -> None:
    """A checkpoint of another seed or recipe is refused, and stays."""

    def kill(report: EpochReport) -> None:
        raise Killed

    options = run_options(card_like)
    with pytest.raises(Killed):
        run_training(options, on_epoch=kill)
    for other in (replace(options, seed=1), replace(options, recipe=replace(card_like, learning_rate=1e-4))):
        with pytest.raises(TrainingError, match="is of another run"):
            run_training(replace(other, resume=True))
    assert (options.output / CHECKPOINT_FILE).exists()


def test_the_best_epoch_is_kept(recipe: Recipe, run_options: RunOptionsFor) -> None:
    """The saved head is that of the lowest validation NLL, and its own figures say so."""
    options = run_options(recipe)
    config = run_training(options)
    history = json.loads((options.output / HISTORY_FILE).read_text())
    nlls = [report["validation_nll"] for report in history]
    figures = config.provenance["training"]
    assert figures["best_epoch"] == int(np.argmin(nlls))
    accuracy = history[figures["best_epoch"]]["validation_accuracy"]
    assert figures["validation_select"]["accuracy"] == pytest.approx(accuracy)


def test_what_test_messages_say_changes_nothing(
    recipe: Recipe, run_options: RunOptionsFor, small_data: Path, small_sources: Sources, tmp_path: Path
) -> None:
    """With all messages of the test labels and the whole test file rewritten, a recipe leaves the same weights."""
    data = tmp_path / "data"
    shutil.copytree(small_data, data)
    plain = run_options(recipe, output=tmp_path / "plain")
    hidden = set(run_training(plain).provenance["split"]["test_labels"])
    for name in ("train.csv", "test.csv"):
        path = data / "banking77" / name
        header, *rows = path.read_text().splitlines()
        rewritten = [
            f"quite another {row}" if name == "test.csv" or row.rsplit(",", 1)[1] in hidden else row for row in rows
        ]
        assert rewritten != rows
        path.write_text("\n".join([header, *rewritten]) + "\n")
    files = tuple(
        replace(file, sha256=sha256_of(data / "banking77" / file.name)) for file in small_sources.banking77.files
    )
    sources = replace(small_sources, banking77=replace(small_sources.banking77, files=files))
    altered = run_options(recipe, output=tmp_path / "altered", data_dir=data, sources=sources)
    config = run_training(altered)
    for file in ("model.safetensors", HISTORY_FILE):
        assert sha256_of(altered.output / file) == sha256_of(plain.output / file)
    assert config.temperature == ModelConfig.load(plain.output / "config.json").temperature


def test_patience_ends_a_run(card_like: Recipe, run_options: RunOptionsFor) -> None:
    """Training ends after as many epochs without a lower NLL as the recipe has patience for."""
    options = run_options(replace(card_like, learning_rate=0.5, max_epochs=50, patience=2))
    config = run_training(options)
    figures = config.provenance["training"]
    assert figures["epochs"] == figures["best_epoch"] + 2 < 50


@pytest.mark.parametrize(("min_improvement", "epochs"), [(0.01, 4), (0.0, 6)])
def test_a_crumb_of_nll_is_no_improvement(
    min_improvement: float,
    epochs: int,
    card_like: Recipe,
    run_options: RunOptionsFor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Patience is counted from the last fall of NLL that counts; the lowest epoch is kept all the same."""
    nlls = iter([1.0, 0.5, 0.498, 0.496, 0.494, 0.492, 0.491])
    monkeypatch.setattr("tokenalign.training.trainer.validation_figures", lambda *rest: (next(nlls), 0.5))
    recipe = replace(card_like, max_epochs=6, patience=3, min_improvement=min_improvement)
    figures = run_training(run_options(recipe)).provenance["training"]
    assert (figures["epochs"], figures["best_epoch"]) == (epochs, epochs)


def test_keeping_the_last_epoch_needs_no_patience(
    card_like: Recipe, run_options: RunOptionsFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe that keeps the last epoch runs through all of them, however NLL goes."""
    nlls = iter([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    monkeypatch.setattr("tokenalign.training.trainer.validation_figures", lambda *rest: (next(nlls), 0.5))
    recipe = replace(card_like, max_epochs=5, patience=1, keep="last")
    figures = run_training(run_options(recipe)).provenance["training"]
    assert (figures["epochs"], figures["best_epoch"]) == (5, 5)


def test_a_diverging_run_is_an_error(
    card_like: Recipe, run_options: RunOptionsFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that is no number ends the run with the step and the remedy."""
    monkeypatch.setattr(
        "tokenalign.training.trainer.batch_loss", lambda head, *rest: head.log_scale * torch.tensor(float("nan"))
    )
    with pytest.raises(TrainingError, match=r"loss of step 1 is nan; lower the learning rate"):
        run_training(run_options(card_like))


def test_provenance(everything: Recipe, run_options: RunOptionsFor, small_data: Path) -> None:
    """The configuration says what the head was made of, and the partitions file which messages were where."""
    options = run_options(everything)
    config = run_training(options)
    assert ModelConfig.load(options.output / "config.json") == config
    provenance = config.provenance
    assert provenance["seed"] == 42
    assert provenance["recipe"]["name"] == "everything"
    assert provenance["data"]["banking77"]["sha256"]["train.csv"] == sha256_of(small_data / "banking77" / "train.csv")
    assert provenance["data"]["clinc150"]["domains"] == ["travel", "home"]
    split = provenance["split"]
    labels = json.loads((small_data / "banking77" / "categories.json").read_text())
    groups = [split[f"{name}_labels"] for name in ("train", "validation", "test")]
    assert [len(group) for group in groups] == [4, 2, 2]
    assert sorted(name for group in groups for name in group) == sorted(labels)
    assert set(split["leakage"]["shared_with_training"].values()) == {0}
    assert config.backbone.sha256 == provenance["backbone"]["weights_sha256"]
    assert {"tokenalign", "torch", "transformers", "numpy", "python"} <= provenance["versions"].keys()
    hashes = json.loads((options.output / PARTITIONS_FILE).read_text())
    assert {name: len(rows) for name, rows in hashes.items()} == {
        name: partition["examples"] for name, partition in split["partitions"].items()
    }


def test_the_trained_head_is_served_as_it_was_validated(card_like: Recipe, run_options: RunOptionsFor) -> None:
    """A classifier on the saved folder gives the accuracy that training reported, with the fitted temperature."""
    options = run_options(card_like)
    config = run_training(options)
    classifier = TokenAlignClassifier.from_pretrained(options.output, device="cpu")
    assert classifier.config.temperature == config.temperature != 1.0
    assert classifier.config.label_template == BANKING_TEMPLATE
    answer = classifier("my card was declined", ["card declined", "cash declined"])
    assert sum(answer["scores"].values()) == pytest.approx(1)


@pytest.mark.data
def test_qwen3_trains_like_any_backbone(card_like: Recipe, qwen3_backbone: Path, run_options: RunOptionsFor) -> None:
    """A causal decoder with a byte-level tokenizer trains by the card's protocol, template included."""
    reference = BackboneReference(reference=str(qwen3_backbone))
    config = run_training(run_options(replace(card_like, max_epochs=1), backbone=reference))
    assert config.provenance["training"]["epochs"] == 1


def test_learning_rates(card_like: Recipe, everything: Recipe) -> None:
    """Constant stays; cosine rises over a tenth, peaks at the recipe's rate and ends at a twentieth of it."""

    def rates(recipe: Recipe) -> list[float]:
        recipe = replace(recipe, learning_rate=1.0, max_epochs=10)
        return [learning_rate_at(recipe, step, 10) for step in range(1, 101)]

    assert set(rates(card_like)) == {1.0}
    cosine = rates(everything)
    assert cosine[:10] == pytest.approx(np.arange(1, 11) / 10)
    assert max(cosine) == cosine[9] == 1.0
    assert cosine[-1] == pytest.approx(0.05)
    assert all(before > after for before, after in pairwise(cosine[9:]))
