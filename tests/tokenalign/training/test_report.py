"""From a head of one's own to a report and a model card, with everything that can be asked for."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.config import AbstentionCalibration, ModelConfig
from tokenalign.training.assessment import AssessOptions, assess, assess_all
from tokenalign.training.baselines import LABEL_WORDINGS, RAW
from tokenalign.training.document import Heading, Paragraph, Table, as_html, as_markdown
from tokenalign.training.model_card import card_blocks, front_matter, limits
from tokenalign.training.own_data import OwnFiles
from tokenalign.training.own_run import OWN_RECIPE
from tokenalign.training.report import comparison_sentence, differs, report_blocks
from tokenalign.training.resampling import compare, draw_counts
from tokenalign.training.run import RunOptions, run_training
from tokenalign.training.wording_study import OWN_WORDING

NLI, GLICLASS, WORDS = "entailment (NLI)", "GLiClass", "TF-IDF and logistic regression"


@pytest.fixture
def train(
    run_options: Callable[..., RunOptions], write_own: Callable[..., Path], tmp_path: Path
) -> Callable[..., Path]:
    """Trains a head for one epoch on a file of one's own and gives its folder."""
    data = write_own("mine.csv")

    def to(name: str, **options: Any) -> Path:
        run = run_options(
            replace(OWN_RECIPE, name=name, max_epochs=1),
            own=OwnFiles(data=data, split=options.pop("split", "messages")),
            output=tmp_path / name,
            **options,
        )
        run_training(run)
        return run.output

    return to


@pytest.fixture
def nli_folder(bert_backbone: Path, tmp_path: Path) -> Path:
    """A tiny entailment model with random weights."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    AutoTokenizer.from_pretrained(bert_backbone).save_pretrained(tmp_path / "nli")
    torch.manual_seed(5)
    names = {0: "contradiction", 1: "neutral", 2: "entailment"}
    config = BertConfig.from_pretrained(bert_backbone, num_labels=3, id2label=names)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "nli")
    return tmp_path / "nli"


def options_for(folder: Path, **overrides: Any) -> AssessOptions:
    plain = AssessOptions(
        model=str(folder),
        data_dir=folder,
        data=folder.parent / "mine.csv",
        device="cpu",
        local_only=True,
        resamples=50,
        erasure_texts=8,
    )
    return replace(plain, **overrides)


def test_everything_that_can_be_asked_for(train: Callable[..., Path], nli_folder: Path, tmp_path: Path) -> None:
    """One run gives baselines, another head, out of scope, wordings and cost, as JSON, as a page and as a card."""
    folder, other = train("one"), train("two", seed=7)
    config = ModelConfig.load(folder / "config.json")
    limit = AbstentionCalibration(kept=0.95, labels=3, min_score=0.2)  # as more messages would have given one
    config = config.model_copy(update={"abstention": limit})
    config.save(folder / "config.json")
    labels = config.provenance["split"]["test_labels"]
    strange, words = tmp_path / "strange.csv", tmp_path / "words.jsonl"
    strange.write_text("text\nwho won the match\nwhat is the weather\nplay some jazz\n")
    words.write_text("\n".join(json.dumps({"name": name, "rich": [name, f"{name} rich"]}) for name in labels))
    report = assess(
        options_for(
            folder,
            compare=(str(other),),
            nli=nli_folder,
            out_of_scope=strange,
            wordings=words,
            cost=True,
            gliclass=None,
        )
    )
    json.dumps(report, allow_nan=False)
    assert list(report["results"]) == ["all"]
    result = report["results"]["all"]
    assert result["baselines"].keys() == {*LABEL_WORDINGS, WORDS, NLI}
    assert result["skipped"] == {GLICLASS: "no weights were given"}
    assert result["others"][str(other)]["trained_labels"] == 8
    assert result["comparisons"].keys() == {*LABEL_WORDINGS, WORDS, NLI, str(other)}
    for figures in (result["model"], *result["baselines"].values()):
        low, high = figures["intervals"]["accuracy"]
        assert low <= figures["accuracy"] <= high
    assert result["out_of_scope"]["texts"] == 3
    assert result["out_of_scope"].keys() >= {"model", RAW}
    answered = result["out_of_scope"]["abstention"]
    assert (answered["min_score"], answered["labels"]) == (0.2, 3)
    found = TokenAlignClassifier.from_pretrained(folder, device="cpu")(
        ["who won the match", "what is the weather", "play some jazz"],
        [{"name": name, "description": name.replace("_", " ")} for name in labels],
        min_score="calibrated",
    )
    assert answered["out_of_scope_answered"] == pytest.approx(np.mean([one["label"] is not None for one in found]))
    assert result["wordings"].keys() == {OWN_WORDING, "rich"}
    assert result["wordings"][OWN_WORDING]["accuracy"] == pytest.approx(result["model"]["accuracy"])
    assert report["cost"]["texts"] == result["model"]["examples"]
    page, card = as_html(report_blocks(report)), as_markdown(card_blocks(config, report))
    for text in (page, card):
        for expected in (
            "Out of scope",
            "Wording of labels",
            "Cost",
            "Every class",
            NLI,
            f"Against {RAW}, on 16 messages",
        ):
            assert expected in text
    assert "fitted with 3 candidates" in page
    assert f"Mind that {other} was trained on 8 of these 8 labels." in page
    assert "all 8 labels train, validate and test, on different messages" in page
    assert any("With its own min_score" in words for words in limits(config, report))
    assert front_matter(config).startswith("---\nlibrary_name: tokenalign\n")
    assert "base_model" not in front_matter(config)  # a local folder is nobody else's


def test_several_heads_give_mean_and_deviation(train: Callable[..., Path]) -> None:
    """The summary is the mean and the sample deviation of the runs' own figures, for the head and each baseline."""
    folders = [train(f"seed-{seed}", seed=seed, split="labels") for seed in (1, 2)]
    report = assess_all([str(folder) for folder in folders], options_for(folders[0]))
    seeds = [run["split"]["seed"] for run in report["runs"]]
    assert seeds == [1, 2]
    for split in ("unseen", "all"):
        for row, key in (("this head", "model"), (RAW, "baselines")):
            for figure in ("accuracy", "nll"):
                found = [run["results"][split][key] for run in report["runs"]]
                values = [(part if key == "model" else part[RAW])[figure] for part in found]
                summary = report["summary"][split][row][figure]
                assert summary == {
                    "mean": pytest.approx(np.mean(values)),
                    "sd": pytest.approx(abs(values[0] - values[1]) / np.sqrt(2)),
                    "runs": 2,
                }
    blocks = report_blocks(report)
    assert blocks[0] == Heading("Evaluation of 2 runs", 1)
    tables = [block for block in blocks if isinstance(block, Table) and block.headings[1] == "runs"]
    assert [table.rows[0][:2] for table in tables] == [["this head", "2"], ["this head", "2"]]
    assert "Run 2: two" not in as_html(blocks)
    assert "seed 2" in as_html(blocks)


def test_messages_that_were_trained_on_are_told(train: Callable[..., Path], tmp_path: Path) -> None:
    """On another file than its own, what the head was trained on is counted and warned of in the report."""
    folder = train("one")
    longer = tmp_path / "longer.csv"
    shutil.copy(tmp_path / "mine.csv", longer)
    with longer.open("a") as file:
        file.write("one more,card_declined\n")
    report = assess(options_for(folder, data=longer, resamples=0, erasure_texts=0))
    trained = ModelConfig.load(folder / "config.json").provenance["split"]["partitions"]["train"]["examples"]
    assert report["trained_on"] == trained
    warnings = [block.words for block in report_blocks(report) if isinstance(block, Paragraph)]
    assert any(words.startswith(f"Warning: the head was trained on {trained} of these messages") for words in warnings)
    assert report["results"]["file"]["comparisons"] == {}


def compared(only_first: int, only_second: int, both: int) -> dict[str, Any]:
    """The comparison of two models by how many messages each alone has right."""
    right, wrong = [0.9, 0.1], [0.1, 0.9]
    first = np.array([right] * only_first + [wrong] * only_second + [right] * both)
    second = np.array([wrong] * only_first + [right] * only_second + [right] * both)
    targets = np.zeros(len(first), dtype=np.int64)
    return compare(first, second, targets, draw_counts(len(targets))).as_dict()


def test_the_test_decides_where_the_interval_says_otherwise() -> None:
    """Five messages against none: the interval leaves 0 out, the exact test has p 0.06, and chance explains it."""
    found = compared(5, 0, 95)
    assert found["intervals"]["accuracy"][0] > 0
    assert not differs(found)
    sentence = comparison_sentence("cosine", found)
    assert "accuracy +0.050, which chance explains: the head alone is right on 5, the other alone on 0" in sentence
    assert "(McNemar's exact p 0.062)" in sentence
    assert "interval of the difference: +0.0" in sentence


@pytest.mark.parametrize(("counts", "words"), [((20, 5), "better by more than"), ((5, 20), "worse by more than")])
def test_a_difference_has_a_direction(counts: tuple[int, int], words: str) -> None:
    """Which of the two is better is said, not left to a sign."""
    assert words in comparison_sentence("cosine", compared(*counts, 75))


def test_limits_come_from_the_figures(train: Callable[..., Path]) -> None:
    """What is not better than a baseline, few messages, weak labels and scarce calibrations are among the limits."""
    folder = train("one")
    config = ModelConfig.load(folder / "config.json")
    report = assess(options_for(folder))
    found = limits(config, report)
    result = report["results"]["all"]
    for name, comparison in result["comparisons"].items():
        better = differs(comparison) and comparison["differences"]["accuracy"] > 0
        words = "is worse than" if differs(comparison) else "is not measurably better than"
        assert better != any(f"On all it {words} {name}: " in limit for limit in found)
    assert "all has 16 messages only: its figures are rough." in found
    assert any("rest on 8 messages, which is few" in limit for limit in found)
    assert "Tested on the labels that it was trained on: how it does on others is unknown." in found
    best = config.provenance["training"]["best_epoch"]
    assert (best == 0) == any("as it began" in limit for limit in found)


def test_a_card_of_a_head_that_says_nothing(train: Callable[..., Path]) -> None:
    """Without provenance the card says so, and a hub's encoder is its base model."""
    folder = train("one")
    config = ModelConfig.load(folder / "config.json")
    bare = config.model_copy(
        update={"provenance": {}, "backbone": config.backbone.model_copy(update={"reference": "owner/encoder"})}
    )
    card = as_markdown(card_blocks(bare, assess(options_for(folder, resamples=0, erasure_texts=0))))
    assert "The head doesn't say how it was made." in card
    assert "base_model: owner/encoder\n" in front_matter(bare)
