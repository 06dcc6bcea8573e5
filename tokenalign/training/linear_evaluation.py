"""A linear head measured on a file of texts with labels."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenalign.errors import InputError
from tokenalign.linear.classifier import LinearClassifier
from tokenalign.references import sha256_of
from tokenalign.training.labelled_data import (
    LabelledFiles,
    LabelledText,
    check_known,
    label_matrix,
    read_labelled,
    read_labelled_texts,
)
from tokenalign.training.linear_run import linear_figures
from tokenalign.training.run import PARTITIONS_FILE
from tokenalign.training.stratified import TEST, TRAIN, make_stratified_split


@dataclass(frozen=True, slots=True)
class LinearAssessment:
    """What was measured. what: the texts in words; trained_on: how many of them the head was trained on.

    figures: as `linear_figures` gives them
    """

    what: str
    trained_on: int
    figures: dict[str, Any]


def assess_linear(
    classifier: LinearClassifier,
    folder: Path,
    data: Path,
    *,
    text_column: str | None = None,
    label_column: str | None = None,
) -> LinearAssessment:
    """The figures of the head in `folder` on `data`: whole, or its test partition where that is what it was trained on.

    Raises `DataError` for a label that the head doesn't know, and `InputError` for the training file of a head that
    was tested on another.
    """
    config = classifier.config
    kept = config.provenance.get("data", {})
    columns = kept.get("columns", [None, None])
    text = text_column or columns[0] or "text"
    label = label_column or columns[1] or ("label" if config.mode == "single_label" else "labels")
    if kept.get("data", {}).get("sha256") == sha256_of(data):
        if "test" in kept:
            raise InputError(f"the head was trained on {data}; give its test file, or other texts", ("data",))
        single = config.mode == "single_label"
        whole = read_labelled(
            LabelledFiles(
                data=data,
                text_column=text,
                label_column=label if single else None,
                labels_column=None if single else label,
            )
        )
        texts = make_stratified_split(whole, int(config.provenance["seed"])).partitions[TEST]
        what = f"test partition of {data}"
    else:
        texts = read_labelled_texts(data, text, label, config.mode)
        check_known(texts, config.labels, data, "the head")
        what = str(data)
    answers = classifier.classify([text.text for text in texts], return_logits=True)
    logits = np.array([[answer["logits"][name] for name in config.labels] for answer in answers], dtype=np.float32)
    figures = linear_figures(config, logits, label_matrix(texts, config.labels))
    return LinearAssessment(what, _trained_on(folder, texts), figures)


def _trained_on(folder: Path, texts: tuple[LabelledText, ...]) -> int:
    path = folder / PARTITIONS_FILE
    if not path.is_file():
        return 0
    trained = set(json.loads(path.read_text(encoding="utf-8")).get(TRAIN, []))
    return sum(text.digest in trained for text in texts)
