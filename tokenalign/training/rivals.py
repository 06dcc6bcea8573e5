"""Other kinds of classifier beside a head: trained on words, or models whose weights the caller has at hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tokenalign.errors import BackboneError
from tokenalign.evaluation import FloatArray
from tokenalign.labels import LabelSet
from tokenalign.training.data import Example

SLOW_TEXTS = 200  # that a model with a pass for each label, or all labels in each pass, is measured on
BATCH_PAIRS = 32
HYPOTHESIS = "This text is about {}."


class Rival(Protocol):
    """Anything that scores texts against labels."""

    def logits(self, texts: Sequence[str], labels: LabelSet) -> FloatArray:
        """`[texts, labels]`, the higher the likelier, before any temperature."""
        ...


class WordRegression:
    """TF-IDF over words and pairs of words, and a logistic regression over the labels that it was trained on.

    scikit-learn's (the extra `train`), with its defaults but sublinear term counts. It can't score any other label.
    """

    def __init__(self, examples: Sequence[Example], seed: int = 0) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline

        self._pipeline = make_pipeline(
            TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True),
            LogisticRegression(C=10.0, max_iter=1_000, random_state=seed),
        )
        self._pipeline.fit([example.text for example in examples], [example.label for example in examples])
        self._column = {str(name): i for i, name in enumerate(self._pipeline.classes_)}

    def knows(self, labels: LabelSet) -> bool:
        """Whether it was trained on each of the labels."""
        return set(labels.names) <= self._column.keys()

    def logits(self, texts: Sequence[str], labels: LabelSet) -> FloatArray:
        """`[texts, labels]` log probabilities over the labels that it was trained on."""
        found: FloatArray = self._pipeline.predict_log_proba(list(texts))
        return found[:, [self._column[name] for name in labels.names]]


class Entailment:
    """A model of natural language inference from a local folder: how far a text entails that it is about a label.

    Source: Yin et al., 2019. Of several descriptions of a label the likeliest counts.
    """

    def __init__(self, folder: Path, *, device: str = "cpu", hypothesis: str = HYPOTHESIS) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            self._model = AutoModelForSequenceClassification.from_pretrained(folder, use_safetensors=True, **options)
            self._tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        except (OSError, ValueError, KeyError) as error:
            raise BackboneError(f"the entailment model in {folder} can't be loaded: {error}") from error
        names = {str(name).lower(): i for i, name in self._model.config.id2label.items()}
        entailing = [i for name, i in names.items() if name.startswith("entail")]
        if len(entailing) != 1:
            raise BackboneError(f"{folder} has no class named entailment, but {sorted(names)}; give an NLI model")
        self._class = int(entailing[0])
        self._hypothesis = hypothesis
        self._model.eval().to(device)

    def logits(self, texts: Sequence[str], labels: LabelSet) -> FloatArray:
        """`[texts, labels]` logits of entailment, a pass for each pair."""
        import torch

        hypotheses = [self._hypothesis.format(description) for description in labels.descriptions]
        pairs = [(text, hypothesis) for text in texts for hypothesis in hypotheses]
        found = []
        for start in range(0, len(pairs), BATCH_PAIRS):
            batch = pairs[start : start + BATCH_PAIRS]
            inputs = self._tokenizer(
                [text for text, _ in batch],
                [hypothesis for _, hypothesis in batch],
                padding=True,
                truncation="only_first",
                return_tensors="pt",
            ).to(self._model.device)
            with torch.inference_mode():
                found.append(self._model(**inputs).logits[:, self._class].float().cpu().numpy())
        return best_description(np.concatenate(found).reshape(len(texts), len(hypotheses)), labels)


class Gliclass:
    """A GLiClass model from a local folder; needs the package `gliclass`, which is in no extra of ours."""

    def __init__(self, folder: Path, *, device: str = "cpu") -> None:
        try:
            from gliclass import (  # type: ignore[import-not-found]  # optional
                GLiClassModel,
                ZeroShotClassificationPipeline,
            )
        except ImportError as error:
            raise BackboneError("the package gliclass is not installed; run: pip install gliclass") from error
        from transformers import AutoTokenizer

        self._pipeline = ZeroShotClassificationPipeline(
            GLiClassModel.from_pretrained(str(folder)),
            AutoTokenizer.from_pretrained(str(folder)),
            classification_type="multi-label",
            device=device,
            progress_bar=False,
        )

    def logits(self, texts: Sequence[str], labels: LabelSet) -> FloatArray:
        """`[texts, labels]` logits of its independent scores; of several descriptions the likeliest counts."""
        descriptions = list(labels.descriptions)
        column = {description: i for i, description in enumerate(descriptions)}
        scores = np.full((len(texts), len(descriptions)), 1e-6)
        for row, answer in zip(scores, self._pipeline(list(texts), descriptions, threshold=0.0), strict=True):
            for found in answer:
                row[column[found["label"]]] = min(max(found["score"], 1e-6), 1 - 1e-6)
        return best_description(np.log(scores / (1 - scores)), labels)


def best_description(logits: FloatArray, labels: LabelSet) -> FloatArray:
    """`[texts, labels]` of `[texts, descriptions]`: each label's is the largest of its descriptions'."""
    found: FloatArray = np.full((len(logits), len(labels)), -np.inf, dtype=logits.dtype)
    for i, owner in enumerate(labels.owners):
        np.maximum(found[:, owner], logits[:, i], out=found[:, owner])
    return found
