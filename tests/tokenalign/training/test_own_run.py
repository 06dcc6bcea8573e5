"""Whole runs on a user's own file."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.config import BackboneReference, ModelConfig
from tokenalign.errors import TrainingError
from tokenalign.label_files import LabelFile
from tokenalign.references import sha256_of
from tokenalign.training.encoder import Encoder
from tokenalign.training.own_data import OwnFiles, read_own
from tokenalign.training.own_run import LABELS_FILE, OWN_RECIPE, for_labels, own_recipe, prepare_own
from tokenalign.training.run import HISTORY_FILE, PARTITIONS_FILE, RunOptions, run_training
from tokenalign.training.splits import HELD_OUT, SplitKind
from tokenalign.training.trainer import EpochReport, Progress

RunOptionsFor = Callable[..., RunOptions]
WriteOwn = Callable[..., Path]
FILES = ["config.json", HISTORY_FILE, LABELS_FILE, "model.safetensors", PARTITIONS_FILE]
QUICK = replace(OWN_RECIPE, name="mine", max_epochs=3)


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("kind", ["labels", "messages"])
def test_a_run_on_a_file(kind: SplitKind, run_options: RunOptionsFor, write_own: WriteOwn) -> None:
    """The folder has the head, its history, hashes and labels; the head answers about them, and nothing is shared."""
    options = run_options(QUICK, own=OwnFiles(data=write_own("mine.csv"), split=kind))
    config = run_training(options)
    assert sorted(path.name for path in options.output.iterdir()) == FILES
    split, data = config.provenance["split"], config.provenance["data"]["own"]
    assert split["kind"] == kind
    assert set(split["leakage"]["shared_with_training"].values()) == {0}
    assert data == {
        "data": {"file": "mine.csv", "sha256": sha256_of(options.own.data)},  # type: ignore[union-attr]
        "columns": ["text", "label"],
    }
    groups = [set(split[f"{name}_labels"]) for name in ("train", "validation", "test")]
    assert len(set.union(*groups)) == 8
    assert sum(map(len, groups)) == (8 if kind == "labels" else 24)
    labels = LabelFile.read(options.output / LABELS_FILE).label_set()
    answer = TokenAlignClassifier.from_pretrained(options.output, device="cpu")("my card was declined", labels)
    assert set(answer["scores"]) == set(labels.names)


@pytest.mark.parametrize("kind", ["labels", "messages"])
def test_what_test_messages_say_changes_nothing(
    kind: SplitKind, run_options: RunOptionsFor, write_own: WriteOwn, tmp_path: Path
) -> None:
    """With every test message rewritten, head, epochs and calibrations are the same to the bit."""
    plain = write_own("plain.csv")
    split = read_own(OwnFiles(data=plain)).split(kind, 42)
    tested = {example.text for example in split.partitions["test"]}
    assert tested
    altered = write_own("altered.csv", lambda text, label: f"quite another {text}" if text in tested else text)
    configs = {}
    for path in (plain, altered):
        options = run_options(QUICK, own=OwnFiles(data=path, split=kind), output=tmp_path / path.stem)
        configs[path.stem] = run_training(options)
    for file in ("model.safetensors", HISTORY_FILE):
        assert sha256_of(tmp_path / "plain" / file) == sha256_of(tmp_path / "altered" / file)
    one, other = (
        {name: getattr(config, name) for name in ("temperature", "multi_label", "abstention")}
        for config in configs.values()
    )
    assert one == other
    kept = [config.provenance["split"]["partitions"] for config in configs.values()]
    assert kept[0]["test"] != kept[1]["test"]
    assert kept[0]["train"] == kept[1]["train"]


def test_nothing_of_the_test_labels_is_encoded(
    encoder: Encoder, write_own: WriteOwn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a test message nor a test label, nor a description of one, reaches the encoder before the end."""
    own = read_own(OwnFiles(data=write_own("mine.csv")))
    read: list[str] = []
    tokenizer = type(encoder.tokenizer())
    for method in ("documents", "labels"):
        original = getattr(tokenizer, method)

        def spy(self: object, texts: list[str], original: Callable[..., object] = original) -> object:
            read.extend(texts)
            return original(self, texts)

        monkeypatch.setattr(tokenizer, method, spy)
    material = prepare_own(QUICK, 42, encoder, own, "labels", feature_dir=tmp_path / "features")
    assert len(read) > 50
    hidden = {example.text for example in material.split.partitions["test"]}
    hidden |= {words for name in material.split.test_labels for words in own.descriptions[name]}
    assert not hidden & set(read)
    assert set(material.labels) == set(material.split.train_labels)
    assert set(material.validation_labels.names) == set(material.split.validation_labels)


def test_a_test_file_is_the_test(run_options: RunOptionsFor, write_own: WriteOwn, tmp_path: Path) -> None:
    """Its messages are tested and nothing else of them is used; a training message that stands in it is left out."""
    data = write_own("mine.csv")
    test = tmp_path / "test.csv"
    test.write_text("text,label\nHELP my card was declined a,card_declined\nnew,cash_declined\n")
    options = run_options(QUICK, own=OwnFiles(data=data, test=test, split="messages"))
    split = run_training(options).provenance["split"]
    assert split["partitions"]["test"]["examples"] == 2
    assert split["leakage"]["of_them"]["train"] == {"exact": 0, "normalised": 1, "other_label": 0}
    assert sum(split["partitions"][name]["examples"] for name in split["partitions"]) == 81
    assert set(HELD_OUT) < split["partitions"].keys()


def test_a_killed_run_resumes_to_the_same_bytes(
    run_options: RunOptionsFor, write_own: WriteOwn, tmp_path: Path
) -> None:
    """A run on a user's file that was killed after an epoch ends as one that was not; another file resumes nothing."""
    own = OwnFiles(data=write_own("mine.csv"))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_training(run_options(QUICK, own=own, output=whole))

    def kill(report: EpochReport) -> None:
        raise Killed

    with pytest.raises(Killed):
        run_training(run_options(QUICK, own=own, output=killed), on_epoch=kill)
    torch.manual_seed(999)
    options = run_options(QUICK, own=own, output=killed, resume=True)
    with pytest.raises(TrainingError, match="is of another run"):
        run_training(replace(options, own=OwnFiles(data=write_own("other.csv", lead="please"))))
    run_training(options)
    assert [sha256_of(killed / file) for file in FILES] == [sha256_of(whole / file) for file in FILES]


def test_a_run_that_was_killed_at_once_begins_anew(run_options: RunOptionsFor, write_own: WriteOwn) -> None:
    """Before the first epoch ends there is nothing to resume, and nothing in the way of the same command."""
    options = run_options(QUICK, own=OwnFiles(data=write_own("mine.csv")))

    def kill(progress: Progress) -> None:
        raise Killed

    with pytest.raises(Killed):
        run_training(options, on_progress=kill)
    run_training(options)
    assert sorted(path.name for path in options.output.iterdir()) == FILES


def test_several_descriptions_of_a_label(
    encoder: Encoder, write_own: WriteOwn, run_options: RunOptionsFor, tmp_path: Path
) -> None:
    """All of a label's descriptions are trained on, those of validation labels compete, and the head keeps them."""
    data, path = write_own("mine.csv"), tmp_path / "labels.jsonl"
    names = read_own(OwnFiles(data=data)).labels.names
    several = {name: [f"{name[:4]} one", f"{name[:4]} two"][: 1 + i % 2] for i, name in enumerate(names)}
    path.write_text("\n".join(json.dumps({"name": name, "description": words}) for name, words in several.items()))
    own = read_own(OwnFiles(data=data, labels=path))
    recipe = for_labels(QUICK, own.labels)
    assert recipe.wordings == QUICK.wordings * 2
    material = prepare_own(recipe, 42, encoder, own, "labels", feature_dir=tmp_path / "features")
    found = encoder.tokenizer().labels(
        [several[name][w % len(several[name])] for w in (0, 1) for name in material.labels]
    )
    np.testing.assert_array_equal(material.label_states.lengths, found.tokens.lengths)
    assert len(material.label_states) == 2 * len(material.labels)
    assert material.validation_labels.descriptions == tuple(
        words for name in material.split.validation_labels for words in several[name]
    )
    options = run_options(QUICK, own=OwnFiles(data=data, labels=path))
    run_training(options)
    kept = LabelFile.read(options.output / LABELS_FILE).label_set()
    assert {label.name: list(label.descriptions) for label in kept.labels} == several


def test_the_cards_head_has_its_parameters(
    run_options: RunOptionsFor, write_own: WriteOwn, word_piece_qwen3: Path
) -> None:
    """On token states as wide as Qwen3-1.7B's, training leaves a head of 2,236,929 parameters, in 8.95 MB."""
    from safetensors import safe_open

    options = run_options(
        replace(QUICK, max_epochs=1),
        own=OwnFiles(data=write_own("mine.csv")),
        backbone=BackboneReference(reference=str(word_piece_qwen3)),
        head_shape=(),
    )
    config = run_training(options)
    assert (config.backbone_width, config.width, config.blocks, config.heads, config.ffn_width) == (
        2048,
        256,
        2,
        4,
        1024,
    )
    path = options.output / "model.safetensors"
    with safe_open(path, framework="np") as file:
        assert sum(file.get_tensor(name).size for name in file.keys()) == 2_236_929  # noqa: SIM118  not a mapping
    assert path.stat().st_size == pytest.approx(4 * 2_236_929, abs=8_192)


def test_what_is_asked_for_otherwise() -> None:
    """Options change the recipe for own data; a number that isn't above 0 is named."""
    recipe = own_recipe("mine", label_template="It is {label}.", max_epochs=2, learning_rate=1e-4)
    assert (recipe.name, recipe.label_template, recipe.wordings) == ("mine", "It is {label}.", ("It is {label}.",))
    assert (recipe.max_epochs, recipe.learning_rate, recipe.batch_size) == (2, 1e-4, OWN_RECIPE.batch_size)
    with pytest.raises(TrainingError, match="batch-size is 0; it must be more than 0"):
        own_recipe("mine", batch_size=0)


def test_messages_that_are_all_answered_right_calibrate_to_no_certainty(
    run_options: RunOptionsFor, write_own: WriteOwn
) -> None:
    """However easy validation is, eight messages leave the temperature near 1, and set no limit to scores."""
    data = write_own("mine.csv", lambda text, label: f"{label} {text.rsplit(' ', 1)[1]}")  # the text names its label
    options = run_options(replace(QUICK, max_epochs=20, learning_rate=3e-3), own=OwnFiles(data=data, split="messages"))
    config = run_training(options)
    found = config.provenance["training"]["validation_calibrate"]
    assert (found["examples"], found["accuracy"]) == (8, 1.0)
    assert 0.6 < config.temperature < 1
    assert config.abstention is None
    assert ModelConfig.load(options.output / "config.json") == config
