"""The temperature that makes probabilities honest, fitted after training on messages that selected nothing."""

import math

from tokenalign.evaluation import FloatArray, IndexArray, negative_log_likelihood, softmax_at

LOWEST, HIGHEST = 0.01, 100.0
_GOLDEN = (math.sqrt(5) - 1) / 2


def fit_temperature(logits: FloatArray, targets: IndexArray) -> float:
    """The temperature between 0.01 and 100 that minimises the NLL of softmax(logits / temperature).

    logits: `[examples, classes]`. The NLL is convex in 1 / temperature, so golden-section search over its logarithm
    finds the minimum; the same numbers always give the same temperature. Source: Guo et al., 2017, section 4.2.
    """

    def nll(log_temperature: float) -> float:
        return negative_log_likelihood(softmax_at(logits, math.exp(log_temperature)), targets)

    low, high = math.log(LOWEST), math.log(HIGHEST)
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = nll(left), nll(right)
    while high - low > 1e-7:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = nll(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = nll(right)
    return math.exp((low + high) / 2)
