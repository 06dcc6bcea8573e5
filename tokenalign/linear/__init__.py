"""Linear heads: labels that are fixed in training, one row of weights for each, on the pooled states of the encoder."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenalign.linear.classifier import LinearClassifier

__all__ = ["LinearClassifier"]


def __getattr__(name: str) -> Any:
    # The classifier imports torch, which takes seconds; who only asks what kind a head is need not wait for it.
    if name == "LinearClassifier":
        from tokenalign.linear.classifier import LinearClassifier

        return LinearClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
