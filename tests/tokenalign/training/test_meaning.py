"""Whether matches mean something: the gap, and deletions of words."""

import numpy as np
import pytest

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.labels import LabelSet
from tokenalign.training.meaning import RANDOM_DELETIONS, Erasure, answers, erasure, without_words, words_at

TEXTS = ["my card was charged twice, why?", "cash not received", "payment declined again", "card"]
LABELS = LabelSet.of(["card charged", "cash declined", "payment"])


def test_answers_are_the_classifiers(bert_classifier: TokenAlignClassifier) -> None:
    """Logits are those that a caller gets, and a gap is the winner's mean best minus median similarity."""
    found = answers(bert_classifier, TEXTS, LABELS)
    served = bert_classifier(TEXTS, LABELS, return_logits=True, explain=True)
    for i, answer in enumerate(served):
        np.testing.assert_allclose(found.logits[i], [answer["logits"][name] for name in LABELS.names], atol=1e-3)
    assert found.gaps.shape == (4,)
    assert bool((found.gaps >= 0).all())
    assert found.gaps[3] == 0  # one token: the best match is the median


def test_deletions_are_scored_from_the_raw_text(
    bert_classifier: TokenAlignClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text is scored without its matched words and without as many random ones, and words alone are deleted."""
    scored: list[str] = []
    original = TokenAlignClassifier.__call__

    def spy(self: TokenAlignClassifier, texts: list[str], *rest: object, **options: object) -> object:
        scored.extend(texts)
        return original(self, texts, *rest, **options)  # type: ignore[call-overload]  # passed on as it came

    monkeypatch.setattr(TokenAlignClassifier, "__call__", spy)
    found = erasure(bert_classifier, TEXTS, LABELS, sample=10, seed=0)
    assert found is not None
    variants = scored[len(TEXTS) :]
    assert len(variants) == found.texts * (1 + RANDOM_DELETIONS)
    for start in range(0, len(variants), 1 + RANDOM_DELETIONS):
        group = [variant.split() for variant in variants[start : start + 1 + RANDOM_DELETIONS]]
        assert len({len(words) for words in group}) == 1
        assert all(any(set(words) < set(text.split()) for text in TEXTS) for words in group)


def test_erasure_repeats_and_samples(bert_classifier: TokenAlignClassifier) -> None:
    """The same seed gives the same figures, and no more texts than asked for are taken."""
    one, two = (erasure(bert_classifier, TEXTS[:3], LABELS, sample=2, seed=1) for _ in range(2))
    assert one == two
    assert one is not None
    assert one.texts <= 2


def test_texts_without_another_word_are_left_out(bert_classifier: TokenAlignClassifier) -> None:
    """A text of one word has nothing to compare a deletion with."""
    assert erasure(bert_classifier, ["card"], LABELS, sample=5, seed=0) is None


def test_words() -> None:
    """Spans find the words that they overlap, at their edges too, and deleting keeps the order of the rest."""
    text = "my  card, was"
    words = [(0, 2), (4, 9), (10, 13)]
    assert words_at(words, [(4, 8)]) == {1}
    assert words_at(words, [(1, 5), (12, 13)]) == {0, 1, 2}
    assert words_at(words, [(2, 4), (9, 10)]) == set()
    assert without_words(text, words, {1}) == "my was"


def test_an_infinite_ratio_is_null_in_json() -> None:
    """JSON has no infinity."""
    assert Erasure(1, 1.0, 0.0, float("inf")).as_dict()["ratio"] is None
    assert Erasure(1, 2.0, 1.0, 2.0).as_dict()["ratio"] == 2.0
