"""Can a head tell messages that none of the labels fits? From its logits alone, since nothing is trained for it.

In scope is the positive class: recall is the share of in-scope messages that are answered, the false positive rate the
share of out-of-scope ones that are answered too.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenalign.evaluation import FloatArray, softmax_at

RECALL = 0.95


@dataclass(frozen=True, slots=True)
class Detection:
    """How well one score tells in scope from out of scope.

    auroc: the share of pairs of one message each in which the in-scope one scores higher; 0.5 is chance
    fpr_at_95_recall: of out-of-scope messages that are answered where 95 % of the in-scope ones are
    """

    auroc: float
    fpr_at_95_recall: float


def scope_scores(logits: FloatArray) -> dict[str, NDArray[np.float64]]:
    """Score -> `[messages]` its values, higher where a message looks more as if one of the labels fitted.

    logits: `[messages, labels]`. The largest logit; its lead over the second ("margin"); the largest probability; and
    the negated entropy of the probabilities, in nats.
    """
    ordered = np.sort(logits.astype(np.float64), axis=1)
    probabilities = softmax_at(logits, 1.0)
    entropy = -(probabilities * np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))).sum(axis=1)
    return {
        "logit": ordered[:, -1],
        "margin": ordered[:, -1] - ordered[:, -2],
        "probability": probabilities.max(axis=1),
        "entropy": -entropy,
    }


def detections(in_scope: FloatArray, out_of_scope: FloatArray) -> dict[str, Detection]:
    """Score -> how well it detects; logits `[messages, labels]` of messages of either kind over the same labels."""
    inside, outside = scope_scores(in_scope), scope_scores(out_of_scope)
    return {name: detection(inside[name], outside[name]) for name in inside}


def detection(inside: NDArray[np.float64], outside: NDArray[np.float64]) -> Detection:
    """The detection by one score; needs scikit-learn (the extra `train`)."""
    from sklearn.metrics import roc_auc_score, roc_curve

    truth = np.concatenate([np.ones(len(inside)), np.zeros(len(outside))])
    scores: Any = np.concatenate([inside, outside])
    false_positives, recalls, _ = roc_curve(truth, scores, drop_intermediate=False)
    at = int(np.argmax(recalls >= RECALL))
    return Detection(float(roc_auc_score(truth, scores)), float(false_positives[at]))


def answered_share(logits: FloatArray, min_score: float) -> float:
    """The share of messages whose best softmax score reaches a limit."""
    return float((softmax_at(logits, 1.0).max(axis=1) >= min_score).mean())
