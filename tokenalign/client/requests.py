"""What is sent: bodies of requests, and how many texts go into each."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict
from urllib.parse import urlsplit, urlunsplit

import tokenalign
from tokenalign.abstention import MinScore
from tokenalign.errors import ConfigError, InputError
from tokenalign.labels import Label, LabelSet
from tokenalign.results import Explain

LabelList = Iterable[str | Label | Mapping[str, Any]] | LabelSet
Labels = LabelList | Sequence[LabelList]

NDJSON = "application/x-ndjson"


class ClassifyOptions(TypedDict, total=False):
    """Options of the service's classify; one that isn't given isn't sent, and the service's default holds."""

    explain: Explain
    return_logits: bool
    top_k: int | None
    multi_label: bool
    min_score: MinScore
    min_margin: float | None
    long_text: Literal["truncate", "window", "error"]
    window_stride: int | None
    label_template: str | None
    model: str | None


@dataclass(frozen=True, slots=True)
class Part:
    """Texts for one request: those of the caller's from number `start` up to, not including, `end`."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Question:
    """A classify call: texts, labels or the id of a label set, and options, as JSON values.

    single: the caller gave one string; labels_per_text: there is a list of labels for each text
    """

    texts: tuple[str, ...]
    single: bool
    labels: list[Any] | None
    labels_per_text: bool
    rest: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        texts: str | Iterable[str],
        labels: Labels | None,
        label_set: str | None,
        options: Mapping[str, Any],
    ) -> "Question":
        """The question as it will be sent.

        Raises `InputError` for what can't be put into a request; values are otherwise for the service to check.
        """
        unknown = options.keys() - ClassifyOptions.__annotations__.keys()
        if unknown:
            known = ", ".join(ClassifyOptions.__annotations__)
            raise TypeError(f"classify() has no option {min(unknown)!r}; there are {known}")
        if (labels is None) == (label_set is None):
            given = "neither is given" if labels is None else "both are given"
            raise InputError(f"labels or label_set is needed, and {given}; give one of them", ("labels",))
        single = isinstance(texts, str)
        if isinstance(texts, (bytes, Mapping)) or not isinstance(texts, Iterable):
            raise InputError(f"must be a string or a list of strings, not {type(texts).__name__}", ("texts",))
        asked = (texts,) if isinstance(texts, str) else tuple(texts)
        candidates = None if labels is None else label_list(labels)
        per_text = bool(candidates) and all(isinstance(item, list) for item in candidates or ())
        if per_text and not single and candidates is not None and len(candidates) != len(asked):
            raise InputError(
                f"{len(candidates):,} lists of labels for {len(asked):,} texts; give one list, or one for each text",
                ("labels",),
            )
        rest = dict(options) if label_set is None else {"label_set": label_set, **options}
        return cls(asked, single, candidates, per_text, rest)

    def parts(self, max_texts: int, max_body_bytes: int) -> list[Part]:
        """Requests within the service's limits, in the texts' order; a text that fits into none goes alone."""
        fixed = len(self.body(Part(0, 0))) + len('"labels": [], ')
        found: list[Part] = []
        start, size = 0, fixed
        for i in range(len(self.texts)):
            weight = self._weight(i)
            if i > start and (i - start >= max_texts or size + weight > max_body_bytes):
                found.append(Part(start, i))
                start, size = i, fixed
            size += weight
        if self.texts:
            found.append(Part(start, len(self.texts)))
        return found

    def body(self, part: Part) -> bytes:
        """The body of the request for a part."""
        texts = {"text": self.texts[0]} if self.single else {"texts": list(self.texts[part.start : part.end])}
        labels = self.labels
        if labels is not None and self.labels_per_text and not self.single:
            labels = labels[part.start : part.end]
        return encoded({**texts, **({} if labels is None else {"labels": labels}), **self.rest})

    def _weight(self, i: int) -> int:
        """Bytes that text number i adds to a body, at most; a comma and a space come between two."""
        labels = len(encoded(self.labels[i])) + 2 if self.labels_per_text and self.labels is not None else 0
        return len(encoded(self.texts[i])) + 2 + labels


def label_set_body(labels: LabelList, name: str | None) -> bytes:
    """The body of a request that has a label set kept."""
    return encoded({"labels": label_list(labels)} | ({} if name is None else {"name": name}))


def label_list(labels: Labels) -> list[Any]:
    """Labels as JSON values."""
    if isinstance(labels, LabelSet):
        return [_label(label) for label in labels.labels]
    if isinstance(labels, (str, bytes, Mapping)) or not isinstance(labels, Iterable):
        raise InputError(f"must be a list of labels, not one {type(labels).__name__}; wrap it in a list", ("labels",))
    return [label_list(item) if isinstance(item, (list, tuple, LabelSet)) else _label(item) for item in labels]


def _label(label: object) -> object:
    if isinstance(label, Label):
        if label.descriptions == (label.name,):
            return label.name
        return {"name": label.name, "description": list(label.descriptions)}
    return dict(label) if isinstance(label, Mapping) else label


def encoded(value: object) -> bytes:
    """The value as JSON in UTF-8; `InputError` for what JSON can't hold.

    A lone surrogate, which UTF-8 can't hold, goes as its escape: the service then says which text it stands in.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"holds a value that can't be sent as JSON: {error}; send plain values") from error
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value).encode("ascii")


def base_url(url: str) -> str:
    """The URL that paths are put behind, a prefix kept; `ConfigError` unless it is one of a service."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"url: must begin with http:// or https:// and a host; it is {url!r}")
    if parts.query or parts.fragment:
        raise ConfigError("url: has a query or a fragment; give the address of the service alone, a path is allowed")
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))


def headers(api_key: str | None) -> dict[str, str]:
    """What every request says of its sender."""
    found = {"User-Agent": f"tokenalign-client/{tokenalign.__version__}", "Accept": "application/json"}
    if api_key is not None:
        if not api_key or not api_key.isascii() or not api_key.isprintable():
            raise ConfigError("api_key: must be printable ASCII and not empty")  # and is not repeated here
        found["Authorization"] = f"Bearer {api_key}"
    return found
