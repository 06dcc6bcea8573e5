"""Classify text against label descriptions that come with the request, by token-level late interaction."""

from typing import TYPE_CHECKING, Any

from tokenalign.errors import TokenAlignError
from tokenalign.labels import Label, LabelSet

if TYPE_CHECKING:
    from tokenalign.classifier import TokenAlignClassifier

__all__ = ["Label", "LabelSet", "TokenAlignClassifier", "TokenAlignError", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The classifier imports torch, which takes seconds; who only validates need not wait for it.
    if name == "TokenAlignClassifier":
        from tokenalign.classifier import TokenAlignClassifier

        return TokenAlignClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
