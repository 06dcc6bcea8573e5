"""Texts that are longer than the model reads: cut, read in windows, or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.config import ModelConfig
from tokenalign.errors import InputError
from tokenalign.long_text import LongText
from tokenalign.text import TextTokenizer, Windowed

LABELS = ["card payment", "cash declined", "not received"]
PIECES = [
    "card",
    "cash!",
    "e\u0301te\u0301",
    "\U0001f600\U0001f44d\U0001f3fd",
    "\u65e5\u672c",
    "\ud55c\u1112\u1161",
    "...",
]


@pytest.fixture(scope="module")
def narrow(bert_backbone: Path, make_head: Any) -> TokenAlignClassifier:
    """A model that reads 12 tokens, a template of two words and two special tokens among them."""
    head = make_head(bert_backbone, max_length=12, document_template="card: {text}!")
    return TokenAlignClassifier.from_pretrained(head, device="cpu")


def tokenizer_of(folder: Path, **values: Any) -> TextTokenizer:
    config = ModelConfig.parse({"backbone": {"reference": str(folder)}, "backbone_width": 32} | values)
    return TextTokenizer.load(folder, config)


def ids_of(windowed: Windowed) -> list[list[int]]:
    tokens = windowed.tokenized.tokens
    return [tokens.values[slice(*tokens.offsets[i : i + 2])].tolist() for i in range(len(tokens))]


def test_windows_are_runs_of_the_texts_tokens(bert_backbone: Path) -> None:
    """Each has the template and special tokens around it; all but the last start a stride apart; the last is full."""
    tokenizer = tokenizer_of(bert_backbone, max_length=8, document_template="card {text} cash")
    assert tokenizer.window_tokens == 4
    text = "a b c d e f g"
    whole = tokenizer_of(bert_backbone, document_template="card {text} cash").documents([text])
    ids = whole.tokens.values.tolist()
    windowed = tokenizer.windows([text], stride=2)
    assert ids_of(windowed) == [[*ids[:2], *ids[2 + s : 6 + s], *ids[-2:]] for s in (0, 2, 3)]
    assert windowed.window_spans(0).tolist() == [[0, 7], [4, 11], [6, 13]]
    assert windowed.kept_counts(0).tolist() == [4, 4, 4]
    assert [text[s:e] for s, e in windowed.kept_spans(0)] == list("abcd") + list("cdef") + list("defg")


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=60), st.integers(1, 8))
def test_windows_cover_the_text(any_tokenizer: TextTokenizer, words: list[str], stride: int) -> None:
    """Every scored token of the whole text is in some window with its own span, and no window is too long."""
    text = " ".join(words)
    tokenizer = narrow_copy(any_tokenizer)
    windowed = tokenizer.windows([text], stride=stride, max_windows=10_000)
    assert windowed.tokenized.tokens.lengths.max() <= 12
    whole = any_tokenizer.documents([text]) if len(text) < 100 else None
    spans = {tuple(span) for span in windowed.kept_spans(0).tolist()}
    if whole is not None and whole.truncations[0] is None:
        assert spans == {tuple(span) for span in whole.kept_spans(0).tolist()}


_COPIES: dict[int, TextTokenizer] = {}


def narrow_copy(tokenizer: TextTokenizer) -> TextTokenizer:
    """The same tokenizer reading 12 tokens."""
    if id(tokenizer) not in _COPIES:
        config = ModelConfig.parse({"backbone": {"reference": "x"}, "backbone_width": 32, "max_length": 12})
        _COPIES[id(tokenizer)] = TextTokenizer(tokenizer._backend, config)
    return _COPIES[id(tokenizer)]


def test_a_short_text_is_one_window_with_the_same_tokens(any_tokenizer: TextTokenizer) -> None:
    """Beside longer ones too."""
    long = "card " * 300
    texts = ["cash", long, "e\u0301!", "..."]
    windowed, plain = any_tokenizer.windows(texts), any_tokenizer.documents(texts)
    assert windowed.counts.tolist() == [1, windowed.counts[1], 1, 1]
    assert windowed.counts[1] > 1
    for i in (0, 2, 3):
        (sequence,) = windowed.sequences(i)
        got, expected = windowed.tokenized.select([sequence]), plain.select([i])
        assert np.array_equal(got.tokens.values, expected.tokens.values)
        assert np.array_equal(got.tokens.keep, expected.tokens.keep)
        assert np.array_equal(got.spans, expected.spans)


def test_parts_keep_a_texts_windows_together(any_tokenizer: TextTokenizer) -> None:
    """Runs of so many sequences, in order, or of one text that has more."""
    windowed = any_tokenizer.windows(["a", "card " * 400, "b", "c"], stride=60)
    count = int(windowed.counts[1])
    parts = list(windowed.parts(2))
    assert [part.counts.tolist() for part in parts] == [[1], [count], [1, 1]]
    assert [ids for part in parts for ids in ids_of(part)] == ids_of(windowed)


@pytest.mark.parametrize(
    ("options", "loc", "word"),
    [
        ({"long_text": "cut"}, ("long_text",), '"truncate", "window" or "error"'),
        ({"long_text": "window", "window_stride": 0}, ("window_stride",), "from 1 to 126"),
        ({"long_text": "window", "window_stride": 127}, ("window_stride",), "from 1 to 126"),
        ({"long_text": "window", "window_stride": True}, ("window_stride",), "it is True"),
        ({"window_stride": 5}, ("window_stride",), 'only long_text "window"'),
        ({"long_text": "window", "max_windows": 0}, ("max_windows",), "at least 1"),
        ({"long_text": "window", "max_windows": 2, "window_stride": 50}, ("texts", 1), "needs 3 windows, at most 2"),
        ({"long_text": "error"}, ("texts", 1), "has 202 tokens, at most 128 are read"),
    ],
)
def test_bad_options_and_long_texts(
    bert_classifier: TokenAlignClassifier, options: Any, loc: tuple[str | int, ...], word: str
) -> None:
    """The option or the text is named, with its value, the limit and what to do."""
    with pytest.raises(InputError, match=word) as caught:
        bert_classifier(["card", "card " * 200], LABELS, **options)
    assert caught.value.loc == loc


def test_error_lets_short_texts_pass(bert_classifier: TokenAlignClassifier) -> None:
    """They are answered as ever."""
    assert bert_classifier("card", LABELS, long_text="error") == bert_classifier("card", LABELS)


def test_short_texts_score_the_same_in_windows(bert_classifier: TokenAlignClassifier) -> None:
    """The very same numbers, and the one window named."""
    windowed = dict(bert_classifier("card twice", LABELS, long_text="window"))
    assert windowed.pop("windows") == {"count": 1, "best": 0, "spans": [[0, 10]]}
    assert windowed == bert_classifier("card twice", LABELS)


def test_windows_read_what_a_cut_would_lose(narrow: TokenAlignClassifier) -> None:
    """A label's words behind the cut are matched there; the winning window is the one that holds them."""
    text = "x " * 30 + "received"
    answer = narrow(text, ["received", "cash"], long_text="window", explain="all", return_logits=True)
    assert answer["truncation"] is None
    spans = answer["windows"]["spans"]
    assert answer["windows"]["count"] == len(spans) > 1
    assert spans[0][0] == 0
    assert spans[-1][1] == len(text)
    assert narrow(text, LABELS)["truncation"] is not None


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=40), st.sampled_from([None, 1, 3]), st.booleans())
def test_contributions_sum_to_the_logit(
    narrow: TokenAlignClassifier, words: list[str], stride: int | None, in_windows: bool
) -> None:
    """Of every label, over all windows and of the best of several descriptions; spans hold the text that they name."""
    text = " ".join(words)
    labels = [{"name": "a", "description": ["card payment", "\u65e5\u672c cash"]}, "not received", "e\u0301"]
    options: Any = {"long_text": "window", "window_stride": stride, "max_windows": 1_000} if in_windows else {}
    answer = narrow(text, labels, explain="all", return_logits=True, **options)
    sums = dict.fromkeys(answer["logits"], 0.0)
    for match in answer["matches"]:
        sums[match["label"]] += match["contribution"]
        assert text[slice(*match["span"])] == match["text"] != ""
        assert match["description"][slice(*match["label_span"])] == match["token"] != ""
    assert sums == pytest.approx(answer["logits"], abs=1e-4)
    if in_windows:
        report, best = answer["windows"], next(iter(answer["scores"]))
        start, end = report["spans"][report["best"]]
        matched = [m["span"] for m in answer["matches"] if m["label"] == best]
        assert any(start <= span[0] and span[1] <= end for span in matched)


def test_a_text_scores_the_same_alone_and_among_others(narrow: TokenAlignClassifier) -> None:
    """In windows, whatever else is in the batch."""
    texts = ["card " * 20, "cash", "x " * 50 + "declined", "\U0001f600 " * 15]
    together = narrow(texts, LABELS, long_text="window", return_logits=True)
    for text, answer in zip(texts, together, strict=True):
        alone = narrow(text, LABELS, long_text="window", return_logits=True)
        assert alone["logits"] == pytest.approx(answer["logits"], abs=1e-4)
        assert alone["windows"]["spans"] == answer["windows"]["spans"]


def test_read_gives_every_mode_in_one_form(bert_tokenizer: TextTokenizer) -> None:
    """Cut texts are one sequence each, with what was cut."""
    found = LongText.of(window_tokens=126).read(bert_tokenizer, ["card", "card " * 200])
    assert found.counts.tolist() == [1, 1]
    assert [t is None for t in found.tokenized.truncations] == [True, False]
