"""The head itself: a linear layer on a window's vector, and the label-wise maximum over a text's windows."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tokenalign.config import MultiLabelCalibration
from tokenalign.linear.config import LinearConfig
from tokenalign.results import FloatArray, independent_scores, softmax
from tokenalign.tokens import offsets_of

_AS_IT_IS = MultiLabelCalibration(scale=1.0, bias=0.0)


class LinearHead(nn.Module):
    """Logits of `[windows, D]` vectors: `[windows, labels]`, in fp32.

    The layer is named `score` as in transformers' sequence classifiers. It has a bias, which those lack: training
    centres the vectors, and what it subtracts ends up there.
    """

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, labels)

    def forward(self, vectors: Tensor) -> Tensor:
        logits: Tensor = self.score(vectors)
        return logits


@torch.inference_mode()
def window_logits(head: LinearHead, vectors: Tensor) -> FloatArray:
    """`[windows, labels]` logits as an array."""
    logits: FloatArray = head(vectors).float().cpu().numpy()
    return logits


def label_wise_maximum(logits: FloatArray, counts: NDArray[np.integer[Any]]) -> FloatArray:
    """`[texts, labels]`: each label's largest logit over the windows of a text.

    counts: `[texts]`, windows of each, at least 1. A sigmoid rises with its logit, so this is the cards' label-wise
    maximum of probabilities.
    """
    largest: FloatArray = np.maximum.reduceat(logits, offsets_of(counts)[:-1], axis=0)
    return largest


def probabilities(logits: FloatArray, config: LinearConfig) -> FloatArray:
    """`[texts, labels]`: a softmax over the labels, or of "multi_label" each label's by itself.

    Raises `NumericalError` where a logit is NaN or infinite.
    """
    if config.mode == "multi_label":
        return independent_probabilities(logits)
    return softmax(logits / np.float32(config.temperature))


def independent_probabilities(logits: FloatArray) -> FloatArray:
    """The sigmoid of each logit; `NumericalError` where one is NaN or infinite."""
    return independent_scores(logits, _AS_IT_IS)
