"""How much a head's answers hang on how labels are worded: the same texts and labels, each time in other words.

Source: the TokenAlign model card, its experiment with names, short and rich descriptions.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.errors import DataError, InputError
from tokenalign.evaluation import accuracy, negative_log_likelihood, softmax_at
from tokenalign.labels import LabelSet
from tokenalign.training.held_out import TestSet
from tokenalign.training.meaning import answers

NAME_KEY = "name"
OWN_WORDING = "as evaluated"


Wordings = dict[str, dict[str, Any]]
"""Formulation -> label -> its description or descriptions."""


def read_wordings(path: Path) -> Wordings:
    """The formulations of a JSON Lines file: `name` is the label, every other key one way to word it.

    `{"name": "stock_investment", "short": "buying company shares", "rich": ["…", "…"]}`. Raises `DataError` naming the
    line that lacks a formulation that others have.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read: {error}; give a UTF-8 file") from error
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: is no JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get(NAME_KEY), str) or len(row) < 2:
            raise DataError(
                f'{path}:{number}: must be an object with "{NAME_KEY}" and at least one wording, such as '
                '{"name": "…", "short": "…", "rich": "…"}'
            )
        if row[NAME_KEY] in (other[NAME_KEY] for other in rows.values()):
            raise DataError(f"{path}:{number}: words label {row[NAME_KEY]!r} again; give each label one line")
        rows[number] = row
    if not rows:
        raise DataError(f"{path} has no labels; write one JSON object a line")
    keys = list(dict.fromkeys(key for row in rows.values() for key in row if key != NAME_KEY))
    for number, row in rows.items():
        if missing := [key for key in keys if key not in row]:
            raise DataError(f"{path}:{number}: has no {missing[0]!r}, which other labels have; give each the same keys")
    return {key: {row[NAME_KEY]: row[key] for row in rows.values()} for key in keys}


def study_wordings(classifier: TokenAlignClassifier, test: TestSet, wordings: Wordings) -> dict[str, Any]:
    """Formulation -> accuracy, NLL and mean probability of the right label; weights and texts are the same throughout.

    Raises `DataError` where a label of the test set has no wording.
    """
    found = {}
    for formulation, words in wordings.items():
        if missing := [name for name in test.labels.names if name not in words]:
            raise DataError(
                f"the wordings don't have label {missing[0]!r} ({len(missing)} of {len(test.labels)} labels are "
                "missing); write it as the data does"
            )
        try:
            labels = LabelSet.of([{"name": name, "description": words[name]} for name in test.labels.names])
        except InputError as error:
            raise DataError(f"wording {formulation!r}: {error}") from error
        found[formulation] = figures(classifier, test, labels)
    return {OWN_WORDING: figures(classifier, test, test.labels)} | found


def figures(classifier: TokenAlignClassifier, test: TestSet, labels: LabelSet) -> dict[str, float]:
    """Accuracy, NLL and mean probability of the right label under one wording."""
    probabilities = softmax_at(answers(classifier, test.texts, labels).logits, 1.0)
    return {
        "accuracy": accuracy(probabilities.argmax(axis=1), test.targets),
        "nll": negative_log_likelihood(probabilities, test.targets),
        "right_probability": float(probabilities[np.arange(len(test.targets)), test.targets].mean()),
    }
