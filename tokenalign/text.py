"""From a user's text to tokens: templates, what is scored, what was cut, and where each token stands in the text.

The rules (`TEXT_RULES_VERSION` names them):
- the text is put into its template, tokenised as a whole and cut from the right to `max_length` tokens;
- no string in a user's text becomes a control token: the tokenizer is rebuilt without its added tokens;
- a token is scored when it overlaps the user's text, is not special, and is not pure punctuation or white space;
  where that leaves nothing, every token that overlaps the text is scored.
"""

import json
import os
import reprlib
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from tokenalign.config import ModelConfig
from tokenalign.errors import BackboneError, ConfigError, InputError, Loc
from tokenalign.labels import check_text
from tokenalign.tokens import BoolArray, IntArray, TokenBatch, offsets_of, ragged_positions, segment_counts

TOKENIZER_FILE = "tokenizer.json"
DEFAULT_MAX_WINDOWS = 64
MAX_TEMPLATE_CHARS = 10_000


@dataclass(frozen=True, slots=True)
class Truncation:
    """What was not read of a text.

    tokens: the tokens that the text has, template and special tokens included
    used: how many of them the model saw
    cut_at: position in the text, in code points, from which on nothing was seen
    """

    tokens: int
    used: int
    cut_at: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedTexts:
    """Texts as tokens.

    tokens: ids with their keep mask
    spans: `[tokens, 2]` int32, start and end of each token in its user's text, in code points; (0, 0) outside of it
    truncations: for each text what was cut, or None
    """

    tokens: TokenBatch
    spans: IntArray
    truncations: tuple[Truncation | None, ...]

    def kept_spans(self, index: int) -> IntArray:
        """`[kept, 2]` spans of the scored tokens of one text."""
        run = slice(*self.tokens.offsets[index : index + 2])
        return self.spans[run][self.tokens.keep[run]]

    def select(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> "TokenizedTexts":
        """The texts at `indices`, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        positions = ragged_positions(self.tokens.offsets[chosen], self.tokens.lengths[chosen])
        return TokenizedTexts(
            self.tokens.select(chosen), self.spans[positions], tuple(self.truncations[i] for i in chosen.tolist())
        )

    def each(self) -> "list[TokenizedTexts]":
        """Every text by itself."""
        offsets = self.tokens.offsets
        runs = [slice(*offsets[i : i + 2]) for i in range(len(self.tokens))]
        return [
            TokenizedTexts(
                TokenBatch(self.tokens.values[run], self.tokens.lengths[i : i + 1], self.tokens.keep[run]),
                self.spans[run],
                self.truncations[i : i + 1],
            )
            for i, run in enumerate(runs)
        ]

    def equal_sequences(self) -> list[tuple[int, int]]:
        """The pairs (first, later) of texts that became the very same ids, and so can't be told apart."""
        seen: dict[bytes, int] = {}
        offsets = self.tokens.offsets
        pairs = []
        for i in range(len(self.tokens)):
            first = seen.setdefault(self.tokens.values[offsets[i] : offsets[i + 1]].tobytes(), i)
            if first != i:
                pairs.append((first, i))
        return pairs


@dataclass(frozen=True, slots=True, eq=False)
class Windowed:
    """Texts as one or more sequences each, all of a text's behind each other.

    tokenized: the sequences; a token in two windows of a text has the same span in both
    counts: `[texts]` int32, sequences of each text, at least 1
    """

    tokenized: TokenizedTexts
    counts: IntArray

    @classmethod
    def whole(cls, tokenized: TokenizedTexts) -> "Windowed":
        """Texts of one sequence each."""
        return cls(tokenized, np.ones(len(tokenized.tokens), dtype=np.int32))

    def __len__(self) -> int:
        return len(self.counts)

    def sequences(self, text: int) -> range:
        """Which sequences are of one text."""
        start = int(self.counts[:text].sum())
        return range(start, start + int(self.counts[text]))

    def kept_spans(self, text: int) -> IntArray:
        """`[kept, 2]` spans of the scored tokens of one text, window by window."""
        return np.concatenate([self.tokenized.kept_spans(i) for i in self.sequences(text)])

    def kept_counts(self, text: int) -> IntArray:
        """`[windows]` how many tokens of each of a text's windows are scored."""
        return np.array([len(self.tokenized.kept_spans(i)) for i in self.sequences(text)], dtype=np.int32)

    def window_spans(self, text: int) -> IntArray:
        """`[windows, 2]` code points from the first to the last token of the text in each window."""
        offsets, found = self.tokenized.tokens.offsets, []
        for i in self.sequences(text):
            spans = self.tokenized.spans[offsets[i] : offsets[i + 1]]
            inside = spans[spans[:, 1] > 0]
            found.append([inside[:, 0].min(), inside[:, 1].max()] if len(inside) else [0, 0])
        return np.array(found, dtype=np.int32)

    def parts(self, max_sequences: int) -> "Iterator[Windowed]":
        """The texts in order, in runs of at most `max_sequences` sequences, or of one text."""
        offsets, start = offsets_of(self.counts), 0
        while start < len(self):
            end = max(start + 1, int(np.searchsorted(offsets, offsets[start] + max_sequences, side="right")) - 1)
            yield Windowed(self.tokenized.select(np.arange(offsets[start], offsets[end])), self.counts[start:end])
            start = end


class TextTokenizer:
    """Turns documents and label descriptions into `TokenizedTexts`, each with its own template.

    Holds no torch and no weights; safe to share between threads.
    """

    def __init__(self, backend: Tokenizer, config: ModelConfig) -> None:
        self._added = sorted(token.content for token in backend.get_added_tokens_decoder().values())
        self._backend = without_added_tokens(backend)
        self._max_length = config.max_length
        self.digest = sha256(self._backend.to_str().encode()).hexdigest()
        self._document_template = self._split_template("document_template", config.document_template, "{text}")
        self._label_template = self._split_template("label_template", config.label_template, "{label}")
        self.window_tokens = self._max_length + 1 - self._boilerplate(*self._document_template)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], config: ModelConfig) -> "TextTokenizer":
        """The tokenizer of the backbone in `folder`; `BackboneError` when it has no fast one."""
        from transformers import AutoTokenizer

        if not (Path(folder) / TOKENIZER_FILE).is_file():
            # transformers would make one with an almost empty vocabulary out of config.json alone.
            raise BackboneError(f"the tokenizer in {folder} can't be loaded: {TOKENIZER_FILE} is missing")
        try:
            tokenizer = AutoTokenizer.from_pretrained(Path(folder), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise BackboneError(f"the tokenizer in {folder} can't be loaded: {error}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise BackboneError(
                f"the tokenizer in {folder} is not a fast one, so it has no offsets to trace a match to its words; "
                "use a backbone that has a tokenizer.json"
            )
        return cls(tokenizer.backend_tokenizer, config)

    def documents(self, texts: Sequence[str], loc: Loc = ("texts",)) -> TokenizedTexts:
        """The tokens of `texts` in the document template; `InputError` at `(*loc, i)` for one without any token."""
        return self._tokenize(texts, *self._document_template, loc)

    def windows(
        self,
        texts: Sequence[str],
        *,
        stride: int | None = None,
        max_windows: int = DEFAULT_MAX_WINDOWS,
        loc: Loc = ("texts",),
    ) -> Windowed:
        """The tokens of `texts`, the longer ones in overlapping windows instead of cut.

        A text is tokenised once, and windows are runs of its tokens with the template and the special tokens around
        each. A window starts `stride` tokens after the one before it (half of `window_tokens` by default); the last one
        ends with the text and is as long as the others. A text that fits is one window, the same tokens as in
        `documents`. Which tokens are scored is decided over the whole text.
        Raises `InputError` at `(*loc, i)` for a text without any token, or of more than `max_windows` windows.
        """
        step = check_window_stride(stride, self.window_tokens) or max(1, self.window_tokens // 2)
        whole = self._tokenize(texts, *self._document_template, loc, cut=False)
        limits = _WindowLimits(self._max_length, step, max_windows)
        offsets = whole.tokens.offsets
        positions: list[NDArray[np.int64]] = []
        counts = np.ones(len(texts), dtype=np.int32)
        for i in range(len(texts)):
            found = _window_positions(whole.spans[offsets[i] : offsets[i + 1]], limits, (*loc, i))
            positions += [run + offsets[i] for run in found]
            counts[i] = len(found)
        if len(positions) == len(texts):
            return Windowed(whole, counts)
        taken = np.concatenate(positions)
        lengths = np.array([len(run) for run in positions], dtype=np.int32)
        tokens = TokenBatch(whole.tokens.values[taken], lengths, whole.tokens.keep[taken])
        return Windowed(TokenizedTexts(tokens, whole.spans[taken], (None,) * len(lengths)), counts)

    def labels(
        self, descriptions: Sequence[str], loc: Loc = ("labels",), template: str | None = None
    ) -> TokenizedTexts:
        """The tokens of label `descriptions` in the label template; `InputError` at `(*loc, i)` likewise.

        template: instead of the model's own; checked as by `check_label_template`
        """
        parts = self._label_template if template is None else self.check_label_template(template)
        return self._tokenize(descriptions, *parts, loc)

    def check_label_template(self, template: object) -> tuple[str, str]:
        """What stands before and after a label in a caller's template, which holds `{label}` once.

        Raises `InputError` at `("label_template",)` for another value, one with a control token in it, and one that
        leaves no token for the label.
        """
        loc = ("label_template",)
        checked = check_text(template, loc, MAX_TEMPLATE_CHARS, "template")
        if checked.count("{label}") != 1:
            raise InputError(f"must hold {{label}} exactly once; it is {reprlib.repr(checked)}", loc)
        try:
            return self._split_template("label_template", checked, "{label}")
        except ConfigError as error:
            raise InputError(str(error).removeprefix("label_template: "), loc) from error

    def _split_template(self, key: str, template: str, field: str) -> tuple[str, str]:
        prefix, suffix = template.split(field)
        for token in self._added:
            if token in prefix or token in suffix:
                raise ConfigError(f"{key}: has the control token {token!r}; templates are plain words, remove it")
        boilerplate = self._boilerplate(prefix, suffix)
        if boilerplate > self._max_length:
            raise ConfigError(
                f"{key}: takes {boilerplate} tokens with one letter in it, max_length is {self._max_length}; "
                "shorten the template or raise max_length"
            )
        return prefix, suffix

    def _boilerplate(self, prefix: str, suffix: str) -> int:
        """Tokens of a template with one letter in it, special tokens included."""
        return len(self._backend.encode(prefix + "x" + suffix))

    def _tokenize(
        self, texts: Sequence[str], prefix: str, suffix: str, loc: Loc, *, cut: bool = True
    ) -> TokenizedTexts:
        encodings = self._backend.encode_batch([prefix + text + suffix for text in texts])
        text_lengths = np.fromiter((len(text) for text in texts), np.int64, len(texts))
        limit = self._max_length if cut else sys.maxsize
        runs = [_cut(encoding, limit) for encoding in encodings]
        lengths = np.fromiter((len(c.ids) for c in runs), np.int32, len(runs))
        ids = np.array([i for c in runs for i in c.ids], dtype=np.int32)
        spans = np.array([s for c in runs for s in c.offsets], dtype=np.int32).reshape(-1, 2) - len(prefix)
        special = np.array([s for c in runs for s in c.special], dtype=np.bool_)
        sequence = np.repeat(np.arange(len(texts)), lengths)
        np.clip(spans, 0, text_lengths[sequence][:, None], out=spans)
        of_user = (spans[:, 1] > spans[:, 0]) & ~special
        spans[~of_user] = 0
        keep = _keep(texts, offsets_of(text_lengths), spans, of_user, sequence)
        kept_none = segment_counts(keep, offsets_of(lengths)) == 0
        keep |= of_user & kept_none[sequence]
        for i in np.flatnonzero(segment_counts(keep, offsets_of(lengths)) == 0):
            raise InputError("has no character that the tokenizer can read; send some visible text", (*loc, int(i)))
        truncations = tuple(
            None
            if c.total == len(c.ids)
            else Truncation(c.total, len(c.ids), max(0, min(c.cut_at - len(prefix), len(t))))
            for c, t in zip(runs, texts, strict=True)
        )
        _take_in_marks(texts, truncations, spans, of_user, offsets_of(lengths))
        return TokenizedTexts(TokenBatch(ids, lengths, keep), spans, truncations)


def refuse_cut(tokenized: TokenizedTexts, loc: Loc = ("texts",)) -> None:
    """Raise `InputError` at `(*loc, i)` for the first text that was cut."""
    for i, truncation in enumerate(tokenized.truncations):
        if truncation is not None:
            raise InputError(
                f"has {truncation.tokens:,} tokens, at most {truncation.used} are read (max_length); shorten or split "
                'it, or ask for long_text "window" or "truncate"',
                (*loc, i),
            )


def check_window_stride(stride: object, window_tokens: int) -> int | None:
    """`stride` itself; `InputError` unless it is None or a whole number that leaves no gap between windows."""
    if stride is None:
        return None
    if isinstance(stride, bool) or not isinstance(stride, int) or not 1 <= stride <= window_tokens:
        raise InputError(
            f"must be a whole number from 1 to {window_tokens}, the tokens of a text in one window; "
            f"it is {reprlib.repr(stride)}",
            ("window_stride",),
        )
    return stride


@dataclass(frozen=True, slots=True)
class _WindowLimits:
    max_length: int
    stride: int
    max_windows: int


def _window_positions(spans: IntArray, limits: _WindowLimits, loc: Loc) -> list[NDArray[np.int64]]:
    """The tokens of each window of one text, whose tokens' `spans` are (0, 0) outside of the user's text."""
    everything = np.arange(len(spans), dtype=np.int64)
    if len(spans) <= limits.max_length:
        return [everything]
    of_user = np.flatnonzero(spans[:, 1] > 0)
    first, last = int(of_user[0]), int(of_user[-1]) + 1
    room = limits.max_length - (len(spans) - (last - first))
    if room < 1:
        raise InputError("leaves no room for a window beside the template; shorten it", loc)
    stride = min(limits.stride, room)
    count = 1 + max(0, -(-(last - first - room) // stride))
    if count > limits.max_windows:
        raise InputError(
            f"needs {count:,} windows, at most {limits.max_windows:,} allowed (max_windows); shorten or split it, or "
            f"raise window_stride, which is {limits.stride}",
            loc,
        )
    starts = [min(first + k * stride, last - room) for k in range(count)]
    return [np.concatenate([everything[:first], everything[s : s + room], everything[last:]]) for s in starts]


@dataclass(frozen=True, slots=True)
class _Cut:
    ids: list[int]
    offsets: list[tuple[int, int]]
    special: list[int]
    total: int
    cut_at: int  # in the rendered text; only meaningful when something was cut


def _cut(encoding: Encoding, max_length: int) -> _Cut:
    """The first tokens that fit, the special tokens at the end kept, as the tokenizer's own right truncation does."""
    ids, offsets, special = encoding.ids, encoding.offsets, encoding.special_tokens_mask
    total = len(ids)
    if total <= max_length:
        return _Cut(ids, offsets, special, total, 0)
    tail = 0
    while tail < total and special[total - 1 - tail]:
        tail += 1
    end = max_length - tail
    keep = [*range(end), *range(total - tail, total)]
    return _Cut([ids[i] for i in keep], [offsets[i] for i in keep], [special[i] for i in keep], total, offsets[end][0])


def _keep(
    texts: Sequence[str],
    text_offsets: NDArray[np.int64],
    spans: IntArray,
    of_user: BoolArray,
    sequence: NDArray[np.int64],
) -> BoolArray:
    """`[tokens]` which tokens cover at least one character that is neither punctuation nor white space."""
    codes = np.frombuffer("".join(texts).encode("utf-32-le"), dtype=np.uint32)
    distinct, inverse = np.unique(codes, return_inverse=True)
    content = np.array([not _is_punctuation_or_space(chr(code)) for code in distinct], dtype=np.bool_)
    running = offsets_of(content[inverse] if len(codes) else np.zeros(0, dtype=np.bool_))
    start = text_offsets[sequence]
    covered = running[start + spans[:, 1]] - running[start + spans[:, 0]]
    keep: BoolArray = of_user & (covered > 0)
    return keep


def _take_in_marks(
    texts: Sequence[str],
    truncations: Sequence[Truncation | None],
    spans: IntArray,
    of_user: BoolArray,
    offsets: NDArray[np.int64],
) -> None:
    """Extend the spans, in place, over the marks that a tokenizer composed into a letter or dropped behind it.

    It gives "e" alone as the place of "e\u0301", and the first of a syllable's Hangul letters.
    """
    for i, text in enumerate(texts):
        if text.isascii() or not any(map(_is_mark, text)):
            continue
        truncation = truncations[i]
        free_until = len(text) if truncation is None else truncation.cut_at
        extended: dict[int, int] = {}  # tokens that share a character's bytes share its end
        for t in range(offsets[i + 1] - 1, offsets[i] - 1, -1):
            if of_user[t]:
                start, end = spans[t].tolist()
                if end not in extended:
                    extended[end] = _end_of_marks(text, end, free_until)
                spans[t, 1] = extended[end]
                free_until = min(start, free_until)


def _end_of_marks(text: str, start: int, limit: int) -> int:
    while start < limit and _is_mark(text[start]):
        start += 1
    return start


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M") or "\u1160" <= character <= "\u11ff"


def _is_punctuation_or_space(character: str) -> bool:
    return character.isspace() or unicodedata.category(character).startswith("P")


def without_added_tokens(backend: Tokenizer) -> Tokenizer:
    """A copy of a tokenizer in which no text is a control token; its post-processor still adds [CLS] and the like.

    `encode(split_special_tokens=True)` is not enough: it spares added tokens that are not special, such as Qwen's
    `<think>`. Truncation and padding are switched off too.
    """
    state: dict[str, Any] = json.loads(backend.to_str())
    state |= {"added_tokens": [], "truncation": None, "padding": None}
    return Tokenizer.from_str(json.dumps(state))
