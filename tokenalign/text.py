"""From a user's text to tokens: templates, what is scored, what was cut, and where each token stands in the text.

The rules (`TEXT_RULES_VERSION` names them):
- the text is put into its template, tokenised as a whole and cut from the right to `max_length` tokens;
- no string in a user's text becomes a control token: the tokenizer is rebuilt without its added tokens;
- a token is scored when it overlaps the user's text, is not special, and is not pure punctuation or white space;
  where that leaves nothing, every token that overlaps the text is scored.
"""

import json
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from tokenalign.config import ModelConfig
from tokenalign.errors import BackboneError, ConfigError, InputError, Loc
from tokenalign.tokens import BoolArray, IntArray, TokenBatch, offsets_of, segment_counts

TOKENIZER_FILE = "tokenizer.json"


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

    def labels(self, descriptions: Sequence[str], loc: Loc = ("labels",)) -> TokenizedTexts:
        """The tokens of label `descriptions` in the label template; `InputError` at `(*loc, i)` likewise."""
        return self._tokenize(descriptions, *self._label_template, loc)

    def _split_template(self, key: str, template: str, field: str) -> tuple[str, str]:
        prefix, suffix = template.split(field)
        for token in self._added:
            if token in prefix or token in suffix:
                raise ConfigError(f"{key}: has the control token {token!r}; templates are plain words, remove it")
        boilerplate = len(self._backend.encode(prefix + "x" + suffix))
        if boilerplate > self._max_length:
            raise ConfigError(
                f"{key}: takes {boilerplate} tokens with one letter in it, max_length is {self._max_length}; "
                "shorten the template or raise max_length"
            )
        return prefix, suffix

    def _tokenize(self, texts: Sequence[str], prefix: str, suffix: str, loc: Loc) -> TokenizedTexts:
        encodings = self._backend.encode_batch([prefix + text + suffix for text in texts])
        text_lengths = np.fromiter((len(text) for text in texts), np.int64, len(texts))
        cut = [_cut(encoding, self._max_length) for encoding in encodings]
        lengths = np.fromiter((len(c.ids) for c in cut), np.int32, len(cut))
        ids = np.array([i for c in cut for i in c.ids], dtype=np.int32)
        spans = np.array([s for c in cut for s in c.offsets], dtype=np.int32).reshape(-1, 2) - len(prefix)
        special = np.array([s for c in cut for s in c.special], dtype=np.bool_)
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
            for c, t in zip(cut, texts, strict=True)
        )
        _take_in_marks(texts, truncations, spans, of_user, offsets_of(lengths))
        return TokenizedTexts(TokenBatch(ids, lengths, keep), spans, truncations)


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
