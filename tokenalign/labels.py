"""Candidate labels: validation, canonical order and hashes."""

import hashlib
import reprlib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenalign.errors import InputError, Loc

DEFAULT_MAX_LABELS = 2_048
DEFAULT_MAX_LABEL_CHARS = 100_000

LabelLike = "str | Label | Mapping[str, Any]"


@dataclass(frozen=True, slots=True)
class Label:
    """One candidate: the name that the answer gives back, and the wordings that are matched against the text."""

    name: str
    descriptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LabelSet:
    """The candidates of one question, validated.

    `descriptions` are all wordings in the caller's order; `owners[i]` is the position in `labels` of the label that
    description i belongs to. Build one with `LabelSet.of`, which validates.
    """

    labels: tuple[Label, ...]
    descriptions: tuple[str, ...] = field(init=False, compare=False)
    owners: tuple[int, ...] = field(init=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "descriptions", tuple(d for label in self.labels for d in label.descriptions))
        object.__setattr__(self, "owners", tuple(i for i, label in enumerate(self.labels) for _ in label.descriptions))
        object.__setattr__(self, "_hash", hash(self.labels))

    def __hash__(self) -> int:
        """Known since the set was made: batches are keyed by it, and a thousand labels take a while to hash."""
        return self._hash

    def __reduce__(self) -> "tuple[type[LabelSet], tuple[tuple[Label, ...]]]":
        """Travels as its labels alone: another process hashes strings otherwise, so the hash must not travel."""
        return LabelSet, (self.labels,)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def names(self) -> tuple[str, ...]:
        """The names, exactly as sent, in the caller's order."""
        return tuple(label.name for label in self.labels)

    def location(self, description: int) -> Loc:
        """Where description number `description` stands in what the caller sent, for an error about it."""
        owner = self.owners[description]
        if len(self.labels[owner].descriptions) == 1:
            return ("labels", owner)
        return ("labels", owner, "description", description - self.owners.index(owner))

    @classmethod
    def of(
        cls,
        labels: "Iterable[str | Label | Mapping[str, Any]] | LabelSet",
        *,
        min_labels: int = 2,
        max_labels: int = DEFAULT_MAX_LABELS,
        max_chars: int = DEFAULT_MAX_LABEL_CHARS,
        loc: Sequence[str | int] = ("labels",),
    ) -> "LabelSet":
        """The validated set of `labels`: strings, `Label`s or `{"name", "description"}` mappings.

        A `LabelSet` is given back as it is; only its size is checked.

        Raises `InputError` naming the label at fault: too few or too many, empty, a NUL or a lone surrogate in it, too
        long, or twice the same name or description after NFC and trimming.
        """
        if isinstance(labels, (str, bytes, Mapping)) or not isinstance(labels, (Iterable, LabelSet)):
            raise InputError(f"must be a list of labels, not one {type(labels).__name__}; wrap it in a list", loc)
        items = labels.labels if isinstance(labels, LabelSet) else list(labels)
        if len(items) < min_labels:
            raise InputError(
                f"{len(items)} label{'' if len(items) == 1 else 's'} given, at least {min_labels} needed; "
                "add the alternatives that the text should be told apart from",
                loc,
            )
        if len(items) > max_labels:
            raise InputError(f"{len(items):,} labels given, at most {max_labels:,} allowed; send fewer candidates", loc)
        if isinstance(labels, LabelSet):
            return labels
        parsed = tuple(_parse(item, (*loc, i), max_chars) for i, item in enumerate(items))
        _refuse_twins(parsed, tuple(loc))
        return cls(parsed)


def label_sets(
    labels: object,
    texts: int,
    *,
    min_labels: int = 2,
    max_labels: int = DEFAULT_MAX_LABELS,
    max_chars: int = DEFAULT_MAX_LABEL_CHARS,
) -> tuple[LabelSet, ...]:
    """One label set for all texts, or, of a list that holds nothing but lists, one for each of `texts` texts.

    Raises `InputError` as `LabelSet.of` does, at `("labels", text, …)` where there is a list for each text, and at
    `("labels",)` where there are more or fewer lists than texts.
    """
    limits = {"min_labels": min_labels, "max_labels": max_labels, "max_chars": max_chars}
    if not has_label_sets(labels):
        return (LabelSet.of(labels, **limits),)  # type: ignore[arg-type]  # `of` refuses what is none
    assert isinstance(labels, (list, tuple))  # noqa: S101  has_label_sets says so
    if len(labels) != texts:
        raise InputError(
            f"{len(labels):,} lists of labels given for {texts:,} text{'' if texts == 1 else 's'}; "
            "give one list of labels, or one for each text",
            ("labels",),
        )
    return tuple(LabelSet.of(items, loc=("labels", i), **limits) for i, items in enumerate(labels))


def has_label_sets(labels: object) -> bool:
    """Whether `labels` are a list for each text: a list or tuple of nothing but lists, tuples and `LabelSet`s."""
    return (
        isinstance(labels, (list, tuple))
        and bool(labels)
        and all(isinstance(item, (list, tuple, LabelSet)) for item in labels)
    )


def check_text(text: object, loc: Sequence[str | int], max_chars: int, what: str = "text") -> str:
    """`text` itself when it is a string that can be encoded; else `InputError` at `loc`."""
    if not isinstance(text, str):
        raise InputError(f"must be a string, not {type(text).__name__}", loc)
    if not text.strip():
        raise InputError(f"is empty or only white space; a {what} needs at least one visible character", loc)
    if len(text) > max_chars:
        raise InputError(f"has {len(text):,} characters, at most {max_chars:,} allowed; shorten or split it", loc)
    if "\x00" in text:
        raise InputError(f"has a NUL character at position {text.index(chr(0))}; remove it", loc)
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"has a lone surrogate U+{ord(text[error.start]):04X} at position {error.start}, no character; "
                "send valid Unicode",
                loc,
            ) from error
    return text


def _parse(item: object, loc: Loc, max_chars: int) -> Label:
    if isinstance(item, str):
        return Label(check_text(item, loc, max_chars, "label"), (item,))
    name: Any
    description: Any
    if isinstance(item, Label):
        name, description = item.name, item.descriptions
    elif isinstance(item, Mapping):
        unknown = sorted(str(key) for key in item.keys() - {"name", "description"})
        if unknown:
            raise InputError(f"has unknown keys {reprlib.repr(unknown)}; a label has a name and a description", loc)
        if "name" not in item:
            raise InputError("has no name; give a string, or a name and a description", loc)
        name = item["name"]
        description = item.get("description", name)
    else:
        raise InputError(f"must be a string or an object with name and description, not {type(item).__name__}", loc)
    check_text(name, (*loc, "name"), max_chars, "label")
    descriptions = [description] if isinstance(description, str) else description
    if not isinstance(descriptions, (list, tuple)):
        raise InputError("must be a string or a list of strings", (*loc, "description"))
    if not descriptions:
        raise InputError("is an empty list; leave it out to use the name, or give at least one", (*loc, "description"))
    for d, description in enumerate(descriptions):
        where = (*loc, "description") if len(descriptions) == 1 else (*loc, "description", d)
        check_text(description, where, max_chars, "label")
    return Label(name, tuple(descriptions))


def _refuse_twins(labels: Sequence[Label], loc: Loc) -> None:
    names: dict[str, int] = {}
    descriptions: dict[str, int] = {}
    for i, label in enumerate(labels):
        first = names.setdefault(_canonical(label.name), i)
        if first != i:
            raise InputError(f"{_shorten(label.name)} is the same label as number {first}; remove one", (*loc, i))
        for description in label.descriptions:
            known = len(descriptions)
            first = descriptions.setdefault(_canonical(description), i)
            if len(descriptions) == known:
                raise InputError(
                    f"description {_shorten(description)} is given twice, here and by label number {first}; "
                    "two equal descriptions can't be told apart, remove one",
                    (*loc, i),
                )


def _canonical(text: str) -> str:
    return text.strip() if text.isascii() else unicodedata.normalize("NFC", text).strip()


def _shorten(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def label_set_id(labels: LabelSet) -> str:
    """The 32 hex digits that name a label set, the same for every order of its labels and of their descriptions.

    128 bits of a SHA-256 over each label in the order of their names: the name, the number of its descriptions and
    the sorted descriptions, as sent, strings as their UTF-8 behind its length, numbers in 8 bytes. Unlike `list_hash`
    it tells two sets apart that say the same of other names.
    """
    digest = hashlib.sha256(b"label set\x00")
    for label in sorted(labels.labels, key=lambda label: label.name):
        digest.update(_counted(label.name.encode("utf-8")))
        digest.update(len(label.descriptions).to_bytes(8, "big"))
        for description in sorted(label.descriptions):
            digest.update(_counted(description.encode("utf-8")))
    return digest.hexdigest()[:32]


def label_hash(description: str) -> str:
    """The hex sha256 of one description, exactly as sent, length-prefixed like a list of one."""
    return list_hash((description,))


def list_hash(descriptions: Iterable[str]) -> str:
    """The hex sha256 that names a candidate list, the same for every order of it.

    Covers the sorted distinct descriptions, each as its UTF-8 behind its length in 8 bytes, so that no two lists share
    an input: ["a", "b"], ["a,b"] and ["a\\x00b"] differ.
    """
    digest = hashlib.sha256()
    for description in sorted(set(descriptions)):
        digest.update(_counted(description.encode("utf-8")))
    return digest.hexdigest()


def _counted(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data
