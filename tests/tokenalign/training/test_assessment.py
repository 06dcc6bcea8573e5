"""The report on a trained head."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.errors import DataError, InputError
from tokenalign.training.assessment import SPLITS, AssessOptions, assess
from tokenalign.training.baselines import LABEL_WORDINGS
from tokenalign.training.data import label_words
from tokenalign.training.material import Sources
from tokenalign.training.recipes import Recipe
from tokenalign.training.run import RunOptions, run_training

AssessOptionsFor = Callable[..., AssessOptions]


@pytest.fixture
def trained(run_options: Callable[..., RunOptions], everything: Recipe) -> Path:
    """The folder of a head that was trained on the small data."""
    options: RunOptions = run_options(replace(everything, max_epochs=1))
    run_training(options)
    return options.output


@pytest.fixture
def assess_options(trained: Path, small_data: Path, small_sources: Sources) -> AssessOptionsFor:
    """Makes the options of a report on that head."""

    def make(**overrides: object) -> AssessOptions:
        plain = AssessOptions(
            model=str(trained), data_dir=small_data, device="cpu", local_only=True, sources=small_sources
        )
        return replace(plain, **overrides)  # type: ignore[arg-type]  # the tests name the fields

    return make


def test_every_split_is_reported_beside_the_baselines(assess_options: AssessOptionsFor) -> None:
    """Each split has the head's figures, both baselines' and what the matches mean, over the right candidates."""
    report = assess(assess_options(splits=tuple(SPLITS)))
    sizes = {
        name: (result["model"]["examples"], result["model"]["classes"]) for name, result in report["results"].items()
    }
    assert sizes == {
        "unseen": (6, 2),
        "seen": (12, 4),
        "all": (24, 8),
        "validation": (10, 2),
        "clinc150": (24, 6),
        "clinc150-unseen": (8, 2),
    }
    for result in report["results"].values():
        assert result["baselines"].keys() >= LABEL_WORDINGS.keys()
        assert result["matches"]["gap"] >= 0
        assert 0 <= result["model"]["accuracy"] <= 1
    json.dumps(report, allow_nan=False)


def test_the_figures_are_the_classifiers(assess_options: AssessOptionsFor, trained: Path, small_data: Path) -> None:
    """The accuracy reported is that of calling the classifier on the unseen labels' test messages."""
    report = assess(assess_options(splits=("unseen",), erasure_texts=0))
    result = report["results"]["unseen"]
    assert "erasure" not in result["matches"]
    labels = report["split"]["test_labels"]
    rows = [line.rsplit(",", 1) for line in (small_data / "banking77" / "test.csv").read_text().splitlines()[1:]]
    rows = [row for row in rows if row[1] in labels]
    classifier = TokenAlignClassifier.from_pretrained(trained, device="cpu")
    answers = classifier([text for text, _ in rows], [label_words(label) for label in labels])
    right = sum(answer["label"] == label_words(label) for answer, (_, label) in zip(answers, rows, strict=True))
    assert result["model"]["accuracy"] == pytest.approx(right / len(rows))


def test_a_head_that_does_not_say_its_split(assess_options: AssessOptionsFor, bert_head: Path) -> None:
    """Without a seed of its own or a given one there is no knowing which labels it has seen."""
    with pytest.raises(InputError, match="doesn't say how its data was split; name the seed"):
        assess(assess_options(model=str(bert_head)))


def test_a_head_of_another_split_is_refused(assess_options: AssessOptionsFor, trained: Path) -> None:
    """Held-out messages that differ from those of the head's own making are an error, not a better score."""
    path = trained / "config.json"
    config = json.loads(path.read_text())
    config["provenance"]["split"]["partitions"]["test"]["sha256"] = "0" * 64
    path.write_text(json.dumps(config))
    with pytest.raises(DataError, match="partition 'test' of seed 42 is not the one"):
        assess(assess_options())


def test_unknown_splits_and_trained_domains(assess_options: AssessOptionsFor, trained: Path) -> None:
    """An unknown split lists the known ones; a head trained on all domains has no unseen one."""
    with pytest.raises(InputError, match="'moon' is unknown; choose among unseen"):
        assess(assess_options(splits=("moon",)))
    path = trained / "config.json"
    config = json.loads(path.read_text())
    config["provenance"]["recipe"]["clinc150_domains"] = ["travel", "home", "banking"]
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match="trained on every domain"):
        assess(assess_options(splits=("clinc150-unseen",)))
