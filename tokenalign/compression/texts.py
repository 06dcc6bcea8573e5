"""Unlabelled texts: read from a file, held out by seed, and as token sequences of at most so many tokens."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tokenalign.errors import BackboneError, DataError
from tokenalign.text import TOKENIZER_FILE
from tokenalign.training.own_data import read_texts

MAX_LENGTH = 256  # the cards' window


def read_unlabelled(path: Path, text_column: str = "text") -> tuple[str, ...]:
    """The texts of a file: each line of a .txt that isn't blank, or the text column of JSON Lines, CSV, TSV or Parquet.

    Raises `DataError` or `InputError` naming what can't be read, and for a file without texts.
    """
    if path.suffix.lower() != ".txt":
        return read_texts(path, text_column)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}; give the path of a file of texts") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error.reason} at byte {error.start}; convert it") from error
    texts = tuple(line.strip() for line in lines if line.strip())
    if not texts:
        raise DataError(f"{path} has no texts; give a file with one in each line")
    return texts


def hold_out(texts: Sequence[str], share: float, seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(texts to train on, texts held out): equal texts once, `share` of them held out, one at least.

    Raises `DataError` where that leaves none to train on.
    """
    unique = list(dict.fromkeys(texts))
    count = max(1, round(share * len(unique)))
    if count >= len(unique):
        raise DataError(f"{len(unique)} different texts: {count} held out leave none to train on; give more texts")
    order = torch.randperm(len(unique), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = set(order[:count])
    train = tuple(text for i, text in enumerate(unique) if i not in held_out)
    return train, tuple(unique[i] for i in sorted(held_out))


def token_sequences(folder: Path, texts: Sequence[str], max_length: int = MAX_LENGTH) -> list[list[int]]:
    """The ids of every text by the tokenizer in `folder`; a longer text gives several sequences, one behind the other.

    Raises `BackboneError` for a folder without a fast tokenizer.
    """
    from transformers import AutoTokenizer

    if not (folder / TOKENIZER_FILE).is_file():
        raise BackboneError(f"the tokenizer in {folder} can't be loaded: {TOKENIZER_FILE} is missing")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).backend_tokenizer
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    sequences: list[list[int]] = []
    for encoding in tokenizer.encode_batch(list(texts)):
        sequences += [part.ids for part in (encoding, *encoding.overflowing) if part.ids]
    return sequences
