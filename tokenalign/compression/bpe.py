"""A byte-level BPE tokenizer as its tokenizer.json describes it."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenalign.errors import CompressionError
from tokenalign.text import TOKENIZER_FILE

Merge = tuple[str, str]


def _byte_characters() -> dict[str, int]:
    """The byte of each character that byte-level tokenizers write: printable Latin-1 for itself, 256 on the rest."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()


@dataclass(frozen=True)
class ByteLevelBpe:
    """A tokenizer.json that holds a byte-level BPE.

    document: the parsed file; merges: in the order of their rank
    """

    document: dict[str, Any]
    merges: tuple[Merge, ...]

    @classmethod
    def read(cls, folder: Path) -> "ByteLevelBpe":
        """The tokenizer in `folder`; `CompressionError` for one that is no byte-level BPE, and says what it is."""
        path = folder / TOKENIZER_FILE
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CompressionError(f"{path} can't be read: {error}; the vocabulary is cut in this file") from error
        model = document.get("model") or {}
        kinds = {part.get("type") for name in ("pre_tokenizer", "decoder") for part in _parts(document.get(name))}
        fine = model.get("type") == "BPE" and "ByteLevel" in kinds and not model.get("byte_fallback")
        if not fine or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            raise CompressionError(
                f"{path} holds a {model.get('type')} tokenizer that is no byte-level BPE; only those lose tokens and "
                "still spell every text, so leave its vocabulary as it is"
            )
        pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
        tokenizer = cls(document, tuple((left, right) for left, right in pairs))
        if missing := [byte for character, byte in BYTE_CHARACTERS.items() if character not in tokenizer.vocabulary]:
            raise CompressionError(f"{path} has no token for byte {missing[0]:#04x}, so it can't spell every text")
        return tokenizer

    @property
    def vocabulary(self) -> dict[str, int]:
        """Ids of the model's tokens, added ones left out unless they are among them."""
        vocabulary: dict[str, int] = self.document["model"]["vocab"]
        return vocabulary

    @property
    def added(self) -> dict[str, int]:
        """Ids of the added tokens: control tokens and the like, which no merge makes."""
        return {token["content"]: token["id"] for token in self.document["added_tokens"]}

    @cached_property
    def ids(self) -> dict[str, int]:
        """Ids of all tokens."""
        return self.vocabulary | self.added

    @cached_property
    def parts(self) -> dict[str, list[Merge]]:
        """The merges that make each token; most have one, bytes have none."""
        parts: dict[str, list[Merge]] = {}
        for left, right in self.merges:
            parts.setdefault(left + right, []).append((left, right))
        return parts


def token_bytes(token: str) -> bytes | None:
    """The bytes that a token stands for; None for one that is written in other characters, as some added ones are."""
    try:
        return bytes(BYTE_CHARACTERS[character] for character in token)
    except KeyError:
        return None


def _parts(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a sequence, or the one step itself."""
    if step is None:
        return []
    if step.get("type") != "Sequence":
        return [step]
    inner = step.get("pretokenizers") or step.get("decoders") or []
    return [part for one in inner for part in _parts(one)]
