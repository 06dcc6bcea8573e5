"""What the name of a tensor says: which block, which module in its author's words brought to ours, weight or bias."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["weight", "bias"]

# Outer modules that say nothing about the tensor: what a trainer, a compiler or a wrapping class puts in front.
_WRAPPERS = frozenset(
    {"model", "module", "head", "net", "network", "aligner", "alignment", "alignment_head", "tokenalign", "_orig_mod"}
)
_BLOCK_CONTAINERS = frozenset(
    {"block", "blocks", "layer", "layers", "h", "resblocks", "encoder", "transformer", "contextualizer", "context"}
)
_NUMBERED_BLOCK = re.compile(r"(\w*?(?:block|layer))s?_?([0-9]{1,9})")
_NUMBER = re.compile(r"[0-9]{1,9}")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]{1,9}")
_KINDS: dict[str, Kind] = {
    "weight": "weight",
    "gamma": "weight",
    "kernel": "weight",
    "bias": "bias",
    "beta": "bias",
    "shift": "bias",
}
_SYNONYMS = {
    "query": ("q", "wq", "queries"),
    "key": ("k", "wk", "keys"),
    "value": ("v", "wv", "values"),
    "output": ("o", "out", "wo", "outputs"),
    "qkv": ("wqkv",),
    "kv": ("wkv",),
    "qk": ("wqk",),
    "attention": ("attn", "mha", "sa"),
    "ffn": ("ff", "mlp", "feedforward"),
    "norm": ("ln", "layernorm", "norms"),
    "projection": ("proj", "project", "projector", "projections"),
    "input": ("inputs", "feature", "features", "state", "states"),
    "label": ("labels", "candidate", "candidates", "description", "descriptions"),
    "document": ("documents", "doc", "docs", "text", "texts", "message"),
}
_CANONICAL = {synonym: word for word, synonyms in _SYNONYMS.items() for synonym in synonyms}


@dataclass(frozen=True, slots=True)
class TensorName:
    """A tensor's name, read.

    container: where its block stands ("encoder.layers"), empty outside of blocks
    block: the block's number as its author counts, -1 outside of blocks
    words: its module's name within that, split into words, ours where a synonym is known
    kind: what it is to its module; a bare parameter is a weight
    """

    name: str
    container: str
    block: int
    words: tuple[str, ...]
    kind: Kind


def split_words(text: str) -> list[str]:
    """The words of a name in snake, camel or dotted case, lower case, ours where a synonym is known."""
    return [_CANONICAL.get(word.lower(), word.lower()) for word in _WORD.findall(text)]


def read_names(names: Iterable[str]) -> list[TensorName]:
    """The names, each read by itself after what all of them begin with is left away."""
    ordered = sorted(names)
    skip = _shared_parts(ordered)
    return [_read(name, skip) for name in ordered]


def _shared_parts(names: list[str]) -> int:
    if len(names) < 2:
        return 0
    split = [name.split(".")[:-1] for name in names]
    shared = 0
    while all(len(parts) > shared and parts[shared] == split[0][shared] for parts in split):
        shared += 1
    return shared


def _read(name: str, skip: int) -> TensorName:
    parts = name.split(".")
    while skip < len(parts) - 1 and parts[skip].lower() in _WRAPPERS:
        skip += 1
    container, block, rest = _split_block(parts, skip)
    kind, words = _split_kind(split_words(".".join(rest)))
    return TensorName(name, container, block, words, kind)


def _split_block(parts: list[str], start: int) -> tuple[str, int, list[str]]:
    for i in range(start, len(parts) - 1):
        if i > start and _NUMBER.fullmatch(parts[i]) and _is_container(parts[i - 1]):
            return ".".join(parts[:i]), int(parts[i]), parts[i + 1 :]
        if match := _NUMBERED_BLOCK.fullmatch(parts[i].lower()):
            return ".".join([*parts[:i], match[1]]), int(match[2]), parts[i + 1 :]
    return "", -1, parts[start:]


def _is_container(part: str) -> bool:
    words = {word.lower() for word in _WORD.findall(part)}
    return bool(words & _BLOCK_CONTAINERS) and "norm" not in words


def _split_kind(words: list[str]) -> tuple[Kind, tuple[str, ...]]:
    if words and words[-1] in _KINDS:
        return _KINDS[words[-1]], tuple(words[:-1])
    if words and words[-1] == "scale" and {"norm", "affine", "input"} & set(words):
        return "weight", tuple(words[:-1])  # of a normalisation; the scale of the logits stands alone
    return "weight", tuple(words)
