"""Other kinds of classifier, each on small weights of its own."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tokenalign.errors import BackboneError
from tokenalign.labels import LabelSet
from tokenalign.training import rivals
from tokenalign.training.data import Example
from tokenalign.training.rivals import Entailment, Gliclass, WordRegression, best_description

TEXTS = ["my card was charged twice", "cash not received", "payment declined"]
LABELS = LabelSet.of([{"name": "7", "description": ["card charged", "payment twice"]}, "cash"])


@pytest.fixture(scope="module")
def nli_folder(bert_backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny entailment model with random weights, its classes in an order of its own."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("nli")
    AutoTokenizer.from_pretrained(bert_backbone).save_pretrained(folder)
    torch.manual_seed(5)
    names = {0: "CONTRADICTION", 1: "ENTAILMENT", 2: "NEUTRAL"}
    config = BertConfig.from_pretrained(bert_backbone, num_labels=3, id2label=names)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_word_regression_learns_words() -> None:
    """Labels that share no words are told apart, columns are in the labels' order, and unknown labels are refused."""
    examples = [Example(f"{word} {i}", label) for label, word in (("a", "card"), ("b", "cash")) for i in range(5)]
    rival = WordRegression(examples)
    for names, expected in ((["a", "b"], [0, 1]), (["b", "a"], [1, 0])):
        logits = rival.logits(["my card", "no cash"], LabelSet.of(names))
        assert logits.argmax(axis=1).tolist() == expected
        np.testing.assert_allclose(np.exp(logits).sum(axis=1), 1)
    assert rival.knows(LabelSet.of(["a", "b"]))
    assert not rival.knows(LabelSet.of(["a", "c"]))


def test_entailment_scores_each_pair(nli_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A label's logit is that of entailment of its likeliest description, each pair as if it were alone."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    monkeypatch.setattr(rivals, "BATCH_PAIRS", 4)
    found = Entailment(nli_folder).logits(TEXTS, LABELS)
    model = AutoModelForSequenceClassification.from_pretrained(nli_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(nli_folder)

    def entails(text: str, description: str) -> float:
        with torch.no_grad():
            inputs = tokenizer(text, f"This text is about {description}.", return_tensors="pt")
            return float(model(**inputs).logits[0, 1])

    expected = [[max(entails(t, d) for d in label.descriptions) for label in LABELS.labels] for t in TEXTS]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_what_is_no_entailment_model(nli_folder: Path, bert_backbone: Path, tmp_path: Path) -> None:
    """Without a class named entailment, or without weights, the folder is named."""
    import json
    import shutil

    other = tmp_path / "other"
    shutil.copytree(nli_folder, other)
    config = json.loads((other / "config.json").read_text())
    config["id2label"] = {"0": "negative", "1": "neutral", "2": "positive"}
    config["label2id"] = {name: int(i) for i, name in config["id2label"].items()}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(BackboneError, match=r"other has no class named entailment, but \['negative'"):
        Entailment(other)
    with pytest.raises(BackboneError, match="can't be loaded"):
        Entailment(tmp_path / "gone")


def test_gliclass_needs_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the package the error says how to get it."""
    monkeypatch.setitem(sys.modules, "gliclass", None)
    with pytest.raises(BackboneError, match="pip install gliclass"):
        Gliclass(tmp_path)


def test_gliclass_scores_become_logits(monkeypatch: pytest.MonkeyPatch, bert_backbone: Path) -> None:
    """Its independent scores, in whatever order it names labels, are put into the labels' columns as logits."""
    asked: dict[str, Any] = {}

    class Pipeline:
        def __init__(self, model: str, tokenizer: object, **options: object) -> None:
            asked.update(options, model=model)

        def __call__(self, texts: Sequence[str], labels: Sequence[str], threshold: float) -> list[list[dict[str, Any]]]:
            asked.update(labels=list(labels), threshold=threshold)
            scores = {"card charged": 0.2, "payment twice": 0.9, "cash": 1.0}
            return [[{"label": name, "score": scores[name]} for name in reversed(labels)] for _ in texts]

    class Model:
        @staticmethod
        def from_pretrained(folder: str) -> str:
            return folder

    module = ModuleType("gliclass")
    module.GLiClassModel = Model  # type: ignore[attr-defined]  # a stand-in
    module.ZeroShotClassificationPipeline = Pipeline  # type: ignore[attr-defined]  # likewise
    monkeypatch.setitem(sys.modules, "gliclass", module)
    found = Gliclass(bert_backbone).logits(TEXTS, LABELS)
    assert asked["labels"] == ["card charged", "payment twice", "cash"]
    assert (asked["model"], asked["threshold"]) == (str(bert_backbone), 0.0)
    assert asked["classification_type"] == "multi-label"
    assert found.shape == (3, 2)
    np.testing.assert_allclose(found[0], [np.log(0.9 / 0.1), np.log((1 - 1e-6) / 1e-6)], rtol=1e-6)


def test_the_best_description_counts() -> None:
    """A label's logit is the largest of its descriptions'; labels with one keep theirs."""
    found = best_description(np.array([[1.0, 3.0, 2.0], [-1.0, -2.0, -9.0]]), LABELS)
    assert found.tolist() == [[3.0, 2.0], [-1.0, -9.0]]
