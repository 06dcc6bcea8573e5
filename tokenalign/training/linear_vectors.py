"""The vectors of a file's texts, made once whatever the split, and handed out by text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenalign.backbone import Backbone
from tokenalign.linear.reading import Reading
from tokenalign.text import TextTokenizer
from tokenalign.tokens import offsets_of, ragged_positions
from tokenalign.training.features import cached_vectors
from tokenalign.training.labelled_data import LabelledText, label_matrix
from tokenalign.training.linear_trainer import Pooled

OnVectors = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class TextVectors:
    """Vectors of distinct texts: `[windows, D]`, all windows of a text behind each other.

    counts: `[texts]`, windows of each; position: text -> its number
    """

    vectors: NDArray[np.float32]
    counts: NDArray[np.int32]
    position: Mapping[str, int]

    def pooled(self, texts: Sequence[LabelledText], names: tuple[str, ...]) -> Pooled:
        """Some of the texts, in that order, with their labels."""
        rows = np.array([self.position[text.text] for text in texts], dtype=np.int64)
        windows = ragged_positions(offsets_of(self.counts)[rows], self.counts[rows])
        return Pooled(self.vectors[windows], self.counts[rows], label_matrix(tuple(texts), names))


def text_vectors(
    backbone: Backbone,
    tokenizer: TextTokenizer,
    reading: Reading,
    texts: Iterable[LabelledText],
    feature_dir: Path,
    what: str,
    on_vectors: OnVectors | None = None,
) -> TextVectors:
    """The vectors of texts, read as the classifier reads them and kept below `feature_dir`.

    what: the texts' name in errors and progress. `InputError` at `(what, i)` for a text that can't be read, i being its
    number among the distinct ones.
    """
    distinct = list(dict.fromkeys(text.text for text in texts))
    windowed = reading.windows(tokenizer, distinct, (what,))

    def tell(done: int, total: int) -> None:
        if on_vectors is not None:
            on_vectors(what, done, total)

    tokens = windowed.tokenized.tokens
    vectors = cached_vectors(backbone, tokens, reading.pooling, feature_dir, on_progress=tell)
    return TextVectors(vectors, windowed.counts, {text: i for i, text in enumerate(distinct)})
