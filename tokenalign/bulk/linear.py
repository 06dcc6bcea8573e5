"""A linear head where a bulk run expects a classifier that is told its labels."""

from collections.abc import Sequence

from tokenalign.bulk.answering import DocumentTokenizer
from tokenalign.config import fingerprint_of
from tokenalign.labels import LabelSet
from tokenalign.linear.classifier import LinearClassifier
from tokenalign.linear.reading import Reading
from tokenalign.results import Classification, Explain


class LinearForBulk:
    """Answers with the head's own labels, whatever a question's are; `explain` must not be asked for."""

    def __init__(self, classifier: LinearClassifier, threshold: float | None = None) -> None:
        self._classifier = classifier
        self._threshold = threshold
        # A run that is gone on with must not go on at another threshold.
        self.fingerprint = fingerprint_of({"head": classifier.fingerprint, "threshold": threshold})

    @property
    def tokenizer(self) -> DocumentTokenizer:
        """What reads texts as the head does, in windows."""
        return _Windows(self._classifier)

    def __call__(
        self,
        texts: Sequence[str],
        labels: LabelSet,
        /,
        *,
        explain: Explain,
        top_k: int | None,
        max_batch_tokens: int,
    ) -> list[Classification]:
        """One answer for each text, in order."""
        return [
            *self._classifier.classify(texts, threshold=self._threshold, top_k=top_k, max_batch_tokens=max_batch_tokens)
        ]


class _Windows:
    def __init__(self, classifier: LinearClassifier) -> None:
        self._classifier = classifier

    def documents(self, texts: Sequence[str], /) -> object:
        return Reading.of(self._classifier.config).windows(self._classifier.tokenizer, texts)
