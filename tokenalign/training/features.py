"""Token states of the frozen encoder, or pooled ones, kept on disk, so that an epoch costs the head alone.

They depend on the encoder and the token ids and on nothing else; so the key of a cache file is the hash of both.
Tokenizer, templates, max_length and the texts change the key by way of the ids.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenalign.backbone import Backbone
from tokenalign.config import fingerprint_of
from tokenalign.errors import NumericalError
from tokenalign.linear.config import Pooling
from tokenalign.linear.pooling import pooled_states
from tokenalign.tokens import TokenBatch

FEATURES_VERSION = 1
CHUNK_SEQUENCES = 1_024  # sequences that are encoded between two marks of progress
CHUNK_WINDOWS = 256  # fewer: long ones, whose token states are only in memory

Float32Array = NDArray[np.float32]
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """The states of several caches as one run of sequences, none of them copied until it is selected.

    stores: each with `[tokens, D]` values; sequence numbers go on from one to the next
    """

    stores: tuple[TokenBatch, ...]

    def __len__(self) -> int:
        return sum(len(store) for store in self.stores)

    def select(self, indices: NDArray[np.int64]) -> TokenBatch:
        """The sequences at `indices`, in that order."""
        ends = np.cumsum([len(store) for store in self.stores])
        owner = np.searchsorted(ends, indices, side="right")
        order = np.argsort(owner, kind="stable")
        parts = [
            store.select(indices[owner == i] - (ends[i] - len(store)))
            for i, store in enumerate(self.stores)
            if bool((owner == i).any())
        ]
        joined = parts[0] if len(parts) == 1 else TokenBatch.concat(parts)
        return joined if bool((np.diff(owner) >= 0).all()) else joined.select(np.argsort(order))


def cached_states(
    backbone: Backbone, ids: TokenBatch, folder: Path, *, on_progress: OnProgress | None = None
) -> TokenBatch:
    """The sequences of `ids` with their `[tokens, D]` fp16 states as a read-only memory map of a file below `folder`.

    What is not on disk is encoded and written; an interrupted call goes on where it stopped. on_progress is told
    (sequences done, sequences in all). Raises `NumericalError` where states overflow fp16.
    """
    kept = _Kept(
        ids.offsets,
        np.dtype(np.float16),
        CHUNK_SEQUENCES,
        lambda part: _as_fp16(backbone.encode(part).float().cpu().numpy()),
    )
    return ids.with_values(_load(folder, kept, backbone, ids, {}, on_progress))


def cached_vectors(
    backbone: Backbone, ids: TokenBatch, pooling: Pooling, folder: Path, *, on_progress: OnProgress | None = None
) -> Float32Array:
    """`[sequences, D]` fp32 pooled vectors of the sequences, kept below `folder` as `cached_states` keeps states.

    Raises `NumericalError` where they hold NaN or infinity.
    """
    kept = _Kept(
        np.arange(len(ids) + 1, dtype=np.int64),
        np.dtype(np.float32),
        CHUNK_WINDOWS,
        lambda part: _finite(pooled_states(backbone, part, pooling).cpu().numpy()),
    )
    return np.array(_load(folder, kept, backbone, ids, {"pooling": pooling}, on_progress))  # small, unlike states


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What a cache file holds of sequences: sequence i is its rows `offsets[i]` to `offsets[i + 1]`.

    chunk: sequences that are computed at a time; rows: those of some sequences
    """

    offsets: NDArray[np.int64]
    dtype: np.dtype[Any]
    chunk: int
    rows: Callable[[TokenBatch], NDArray[Any]]


def _load(
    folder: Path,
    kept: _Kept,
    backbone: Backbone,
    ids: TokenBatch,
    key: dict[str, str],
    on_progress: OnProgress | None,
) -> NDArray[Any]:
    """A read-only memory map of the file below `folder`, computed where it isn't there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_key(backbone, ids, key)}.npy"
    if not path.exists():
        _encode_to(path, kept, backbone, ids, on_progress)
    elif on_progress is not None:
        on_progress(len(ids), len(ids))
    states: NDArray[Any] = np.load(path, mmap_mode="r")
    return states


def _key(backbone: Backbone, ids: TokenBatch, more: dict[str, str]) -> str:
    return fingerprint_of(
        {
            "version": FEATURES_VERSION,
            "backbone": asdict(backbone.identity),
            "ids": sha256(np.ascontiguousarray(ids.values, dtype="<i4").tobytes()).hexdigest(),
            "lengths": sha256(np.ascontiguousarray(ids.lengths, dtype="<i4").tobytes()).hexdigest(),
            **more,
        }
    )


def _encode_to(path: Path, kept: _Kept, backbone: Backbone, ids: TokenBatch, on_progress: OnProgress | None) -> None:
    """Encode chunk by chunk into a partial file that takes its name once it is whole."""
    partial, mark = path.with_suffix(".partial"), path.with_suffix(".progress")
    offsets = kept.offsets
    shape = (int(offsets[-1]), backbone.width)
    done = int(mark.read_text()) if partial.exists() and mark.exists() else 0
    states = np.lib.format.open_memmap(partial, mode="r+" if done else "w+", dtype=kept.dtype, shape=shape)
    for start in range(done, len(ids), kept.chunk):
        end = min(start + kept.chunk, len(ids))
        states[offsets[start] : offsets[end]] = kept.rows(ids.select(np.arange(start, end)))
        states.flush()
        _write_atomically(mark, str(end))
        if on_progress is not None:
            on_progress(end, len(ids))
    del states
    partial.replace(path)
    mark.unlink(missing_ok=True)


def _finite(rows: Float32Array) -> Float32Array:
    if not np.isfinite(rows).all():
        raise NumericalError("the encoder's pooled vectors hold NaN or infinity; the model or its dtype is at fault")
    return rows


def _as_fp16(rows: Float32Array) -> NDArray[np.float16]:
    largest = float(np.abs(rows).max(initial=0.0))
    limit = float(np.finfo(np.float16).max)  # as a Python float: numpy would compare in fp16, where 1e5 is infinite
    if not largest <= limit:
        raise NumericalError(
            f"the encoder's token states reach {largest:.3g}, fp16 ends at {limit:.0f}; "
            "features are cached in fp16, so this backbone can't be trained on, or its dtype is at fault"
        )
    return rows.astype(np.float16)


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def as_tensor(batch: TokenBatch, device: torch.device) -> Tensor:
    """`[tokens, D]` states of a selected batch as fp32 on `device`."""
    return torch.from_numpy(batch.values.astype(np.float32)).to(device)


def mean_pooled(features: TokenBatch) -> Float32Array:
    """`[sequences, D]` fp32 unit vectors: the mean over all of a sequence's token states, normalised.

    The mean over every token that the attention mask covers, special ones included, then L2: what sentence-transformers
    does for all-MiniLM-L6-v2 (its modules Pooling with mean tokens, and Normalize).
    """
    pooled = np.empty((len(features), features.values.shape[1]), dtype=np.float32)
    offsets = features.offsets
    for i in range(len(features)):
        pooled[i] = features.values[offsets[i] : offsets[i + 1]].mean(axis=0, dtype=np.float32)
    pooled /= np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)
    return pooled
