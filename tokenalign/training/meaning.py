"""Do the matches mean something? How far the best match stands out, and what deleting the matched words costs."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.evaluation import FloatArray, erasure_ratio
from tokenalign.labels import LabelSet
from tokenalign.scoring import Aligner
from tokenalign.tokens import TokenBatch

CHUNK_TEXTS = 256
RANDOM_DELETIONS = 3  # random draws per text, whose mean is compared with the one deletion of the matched words


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """A classifier's numbers for some texts.

    logits: `[texts, labels]`, calibrated
    gaps: `[texts]` mean over the winning label's tokens of best minus median similarity; 0 where every token of the
        text matches alike, and the matches say nothing
    """

    logits: FloatArray
    gaps: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Erasure:
    """What deletions cost the winning label's logit.

    texts: how many could be tested: with matched words, and a kept word beside them
    matched_drop: mean drop without the matched words; random_drop: without as many random kept words
    ratio: the one over the other; above 1 the matched words matter more than chance
    """

    texts: int
    matched_drop: float
    random_drop: float
    ratio: float

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON has them; an infinite ratio as None."""
        return asdict(self) | {"ratio": self.ratio if np.isfinite(self.ratio) else None}


def answers(classifier: TokenAlignClassifier, texts: Sequence[str], labels: LabelSet) -> Answers:
    """The classifier's logits and match gaps, computed along its own path."""
    aligner = Aligner(classifier.head, classifier.config.temperature)

    def project(tokens: TokenBatch, what: str) -> TokenBatch:
        return tokens.with_values(aligner.project(classifier.backbone.encode(tokens), what))

    tokenized_labels = classifier.tokenizer.labels(labels.descriptions)
    queries = aligner.label_queries(project(tokenized_labels.tokens, "labels"))
    logits: list[FloatArray] = []
    gaps: list[float] = []
    for start in range(0, len(texts), CHUNK_TEXTS):
        tokenized = classifier.tokenizer.documents(texts[start : start + CHUNK_TEXTS])
        keys = aligner.document_keys(project(tokenized.tokens, "texts"))
        logits.append(aligner.logits(labels, queries, keys))
        for i, winner in enumerate(logits[-1].argmax(axis=1).tolist()):
            found = aligner.align(labels, winner, tokenized_labels, queries, keys.slice(i))
            gaps.append(float((found.similarity - found.median).mean()))
    return Answers(np.concatenate(logits), np.array(gaps))


def erasure(
    classifier: TokenAlignClassifier, texts: Sequence[str], labels: LabelSet, *, sample: int, seed: int
) -> Erasure | None:
    """Drops of the winning logit over at most `sample` random texts; None when none of them can be tested.

    Words are runs of anything but white space. They are deleted from the raw text, and what is left is tokenised,
    encoded and scored from scratch.
    """
    rng = np.random.default_rng(seed)
    chosen = [texts[i] for i in rng.permutation(len(texts))[:sample]]
    found = classifier(chosen, labels, explain=True, return_logits=True)
    kept_spans = classifier.tokenizer.documents(chosen)
    variants: list[str] = []
    winners: list[tuple[str, float]] = []
    for i, (text, answer) in enumerate(zip(chosen, found, strict=True)):
        words = [match.span() for match in re.finditer(r"\S+", text)]
        matched = words_at(words, (match["span"] for match in answer["matches"]))
        kept = sorted(words_at(words, kept_spans.kept_spans(i).tolist()))
        if not matched or len(kept) <= len(matched):
            continue
        variants.append(without_words(text, words, matched))
        for _ in range(RANDOM_DELETIONS):
            drawn = rng.choice(kept, len(matched), replace=False).tolist()
            variants.append(without_words(text, words, set(drawn)))
        winners.append(next(iter(answer["logits"].items())))
    if not winners:
        return None
    left = classifier(variants, labels, return_logits=True)
    per_text = 1 + RANDOM_DELETIONS
    drops = np.array(
        [
            [logit - left[row * per_text + column]["logits"][label] for column in range(per_text)]
            for row, (label, logit) in enumerate(winners)
        ]
    )
    matched_drops, random_drops = drops[:, 0], drops[:, 1:].ravel()
    return Erasure(
        len(winners),
        float(matched_drops.mean()),
        float(random_drops.mean()),
        erasure_ratio(matched_drops, random_drops),
    )


def words_at(words: Sequence[tuple[int, int]], spans: Iterable[Sequence[int]]) -> set[int]:
    """Positions of the words that any of the spans overlaps."""
    return {w for start, end in spans for w, (first, last) in enumerate(words) if first < end and start < last}


def without_words(text: str, words: Sequence[tuple[int, int]], deleted: set[int]) -> str:
    """The text's other words, in order, a space between them."""
    return " ".join(text[start:end] for w, (start, end) in enumerate(words) if w not in deleted)
