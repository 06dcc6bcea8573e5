"""`train --head linear` from files to folders, and what the commands make of those."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tokenalign.cli import main
from tokenalign.config import BackboneReference
from tokenalign.linear import LinearClassifier
from tokenalign.linear.config import LinearConfig
from tokenalign.training.labelled_data import LabelledFiles
from tokenalign.training.linear_run import LinearRunOptions, run_linear_training
from tokenalign.training.linear_trainer import LinearRecipe

WORDS = ["card", "cash", "declined"]
Train = Callable[..., Path]


def write(path: Path, texts: int, *, several: bool, seed: int = 0) -> Path:
    """Texts that name their labels among other letters; of several labels, some texts are longer than a window."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(texts):
        labels = [word for word in WORDS if rng.random() < 0.5] if several else [WORDS[i % 3]]
        filler = " ".join(rng.choice(list("abcdefgh"), size=12 if several and i % 4 == 0 else 3))
        text = f"{filler} {' '.join(labels)} {i}"
        rows.append({"text": text, "labels": labels} if several else {"text": text, "label": labels[0]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def train(bert_backbone: Path, feature_dir: Path, tmp_path: Path) -> Train:
    """Trains with the command and gives the head's folder; keywords say what the texts are like."""

    def run(*words: str, several: bool, texts: int = 120, name: str = "run") -> Path:
        data = write(tmp_path / f"{'several' if several else 'one'}.jsonl", texts, several=several)
        output = tmp_path / name
        options = ["--output", str(output), "--feature-dir", str(feature_dir), "--backbone", str(bert_backbone)]
        short = ["--window", "16", "--stride", "8", "--learning-rate", "0.05", "--device", "cpu", "--local-only"]
        assert main(["train", "--head", "linear", "--data", str(data), *options, *short, *words]) == 0
        return output

    return run


def test_one_label_a_text_from_file_to_answer(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A head is trained, tested, and answers on the terminal without being told a label."""
    folder = train(several=False)
    out, err = capsys.readouterr()
    figures = json.loads((folder / "evaluation.json").read_text())["figures"]
    assert f"accuracy {figures['accuracy']:.4f}" in out
    assert figures["accuracy"] > 0.8
    assert "split of seed 42: 3 labels; texts: train 72, validation 12, calibration 18, test 18" in err
    config = LinearConfig.load(folder / "config.json")
    assert (config.mode, config.labels, config.pooling) == ("single_label", ("card", "cash", "declined"), "mean")
    assert config.temperature != 1
    assert config.provenance["split"]["leakage"]["shared_with_training"] == {
        "validation": 0,
        "calibration": 0,
        "test": 0,
    }
    assert main(["--model", str(folder), "--text", "a cash b", "--json", "--device", "cpu"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["label"] == "cash"
    assert sum(answer["scores"].values()) == pytest.approx(1)


def test_several_labels_a_text_from_file_to_answer(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """A threshold is chosen, its spread is told, and figures say how many labels are given and how many hold."""
    folder = train(several=True)
    out = capsys.readouterr().out
    config = LinearConfig.load(folder / "config.json")
    assert config.threshold is not None
    partitions = json.loads((folder / "partitions.json").read_text())
    assert config.threshold.texts == len(partitions["calibration"])
    assert f"threshold: {config.threshold.threshold:.2f}; {config.threshold.spread}" in out
    assert ("warning: threshold" in out) is not config.threshold.stable
    figures = json.loads((folder / "evaluation.json").read_text())["figures"]
    assert figures["macro_f1"] > 0.7
    assert f"{figures['predicted_positive_rate']:.1%} of all pairs of text and label are given" in out
    assert main(["--model", str(folder), "--text", "a card b cash", "--threshold", "0.3", "--device", "cpu"]) == 0
    shown, told = capsys.readouterr()
    assert "labels: " in shown
    assert told == ""


def test_a_served_answer_is_what_was_tested(train: Train) -> None:
    """The saved head gives the test texts, windows and all, the figures that were saved with it."""
    folder = train(several=True)
    data = folder.parent / "several.jsonl"
    saved = json.loads((folder / "evaluation.json").read_text())["figures"]
    output = folder.parent / "again.json"
    words = ["evaluate", "--model", str(folder), "--data", str(data), "--output", str(output), "--device", "cpu"]
    assert main(words) == 0
    (report,) = json.loads(output.read_text())
    assert report["data"] == f"test partition of {data}"
    for name in ("texts", "macro_f1", "micro_f1", "exact_match", "predicted_positive_rate"):
        assert report["figures"][name] == saved[name]
    assert report["figures"]["pair_nll"] == pytest.approx(saved["pair_nll"], abs=1e-5)


def test_texts_that_were_trained_on_are_told(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """Any other file is measured whole, with a warning about what the head has seen of it."""
    folder = train(several=False)
    other = write(folder.parent / "other.jsonl", 60, several=False)
    capsys.readouterr()
    assert main(["evaluate", "--model", str(folder), "--data", str(other), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    hashes = json.loads((folder / "partitions.json").read_text())
    assert "of these texts" in out
    assert len(hashes["train"]) == 72
    assert f"{other}: 60 texts" in out.replace("\n", "")


def test_the_same_command_gives_the_same_files(train: Train) -> None:
    """Weights, configuration and figures, bit by bit."""
    first, again, other = (
        train(several=True),
        train(several=True, name="again"),
        train("--seed", "7", several=True, name="other"),
    )
    for name in ("config.json", "model.safetensors", "history.json", "partitions.json", "evaluation.json"):
        assert (first / name).read_bytes() == (again / name).read_bytes(), name
    assert (first / "partitions.json").read_bytes() != (other / "partitions.json").read_bytes()


def test_several_seeds_have_folders_and_thresholds_of_their_own(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that the threshold's moves from seed to seed are seen."""
    folder = train("--seed", "1", "2", several=True)
    out = capsys.readouterr().out
    chosen = []
    for seed in (1, 2):
        threshold = LinearConfig.load(folder / f"seed-{seed}" / "config.json").threshold
        assert threshold is not None
        chosen.append(f"{threshold.threshold:.2f}")
    assert f"thresholds of 2 seeds: {', '.join(chosen)}" in out


def test_a_file_of_texts_is_answered(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """`batch` takes the head's own labels, and gives all that reach the threshold."""
    folder = train(several=True)
    texts, answers = folder.parent / "texts.jsonl", folder.parent / "answers.jsonl"
    rows = [{"text": "a card b cash"}, {"text": ""}, {"text": "declined " * 40}, {"text": "card " * 2_000}]
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["batch", str(texts), str(answers), "--model", str(folder), "--device", "cpu", "--top-k", "all"]
    assert main(words) == 3
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    classifier = LinearClassifier.from_pretrained(folder, device="cpu")
    expected = classifier.classify([rows[0]["text"], rows[2]["text"]])
    assert [line["row"] for line in lines] == [0, 2]
    assert [line["labels"] for line in lines] == [answer["labels"] for answer in expected]
    assert lines[0]["scores"] == pytest.approx(expected[0]["scores"], abs=1e-5)
    bad = [json.loads(line) for line in (folder.parent / "answers.errors.jsonl").read_text().splitlines()]
    assert [line["row"] for line in bad] == [1, 3]
    assert "at most 64 allowed (max_windows)" in bad[1]["reason"]
    for wrong in (["--labels-file", str(texts)], ["--explain"]):
        assert main([*words, "--overwrite", *wrong]) == 2
        assert "a linear head has no use for it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--head", "linear", "--recipe", "banking77"], "recipe: a linear head has no use for it"),
        (["--head", "linear", "--data", "x.jsonl", "--resume"], "resume: a linear head has no use for it"),
        (["--head", "linear", "--data", "x.jsonl", "--batch-size", "0"], "batch-size: is 0; it must be more than 0"),
        (["--data", "x.jsonl", "--window", "64"], "window: goes with --head linear"),
    ],
)
def test_options_of_the_other_kind_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Instead of being ignored."""
    assert main(["train", *words, "--output", str(tmp_path / "run"), "--local-only"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--text", "x", "--labels", "a", "b"], "labels: a linear head has no use for it"),
        (["--text", "x", "--explain"], "explain: a linear head has no use for it"),
        (["evaluate"], "data: none given"),
        (["evaluate", "--data", "x.jsonl", "--cost"], "cost: a linear head has no use for it"),
    ],
)
def test_commands_say_what_a_linear_head_does_not_take(
    words: list[str], said: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the terminal and in evaluation."""
    folder = train(several=False)
    place = 1 if words[0] == "evaluate" else 0
    assert main([*words[:place], "--model", str(folder), *words[place:]]) == 2
    assert said in capsys.readouterr().err


def test_a_full_folder_is_refused(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written over."""
    folder = train(several=False)
    before = (folder / "model.safetensors").read_bytes()
    data = folder.parent / "one.jsonl"
    assert main(["train", "--head", "linear", "--data", str(data), "--output", str(folder)]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.data
def test_a_four_layer_qwen35_is_trained_on_its_last_tokens(
    qwen35_backbone: Path, feature_dir: Path, tmp_path: Path
) -> None:
    """The saved head answers as the cached vectors did; its backbone is frozen and pinned by hash."""
    data = write(tmp_path / "data.jsonl", 60, several=True)
    before = (qwen35_backbone / "model.safetensors").read_bytes()
    options = LinearRunOptions(
        files=LabelledFiles(data=data),
        output=tmp_path / "run",
        feature_dir=feature_dir,
        name="tiny",
        recipe=LinearRecipe(max_epochs=3),
        window=12,
        stride=6,
        backbone=BackboneReference(reference=str(qwen35_backbone)),
        device="cpu",
        local_only=True,
    )
    config, _ = run_linear_training(options)
    assert (config.pooling, config.window, config.stride) == ("last", 12, 6)
    assert config.backbone.sha256 is not None
    assert (qwen35_backbone / "model.safetensors").read_bytes() == before
    assert load_file(tmp_path / "run" / "model.safetensors")["score.weight"].shape == (3, 64)
    answer = LinearClassifier.from_pretrained(tmp_path / "run", device="cpu").classify("card " * 30)
    assert answer["windows"]["count"] > 2
