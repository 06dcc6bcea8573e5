"""Token states of the frozen encoder, kept on disk in fp16, so that an epoch costs the head alone.

States depend on the encoder and the token ids and on nothing else; so the key of a cache file is the hash of both.
Tokenizer, templates, max_length and the texts change the key by way of the ids.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenalign.backbone import Backbone
from tokenalign.config import fingerprint_of
from tokenalign.errors import NumericalError
from tokenalign.tokens import TokenBatch

FEATURES_VERSION = 1
CHUNK_SEQUENCES = 1_024  # sequences that are encoded between two marks of progress

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
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_key(backbone, ids)}.npy"
    if not path.exists():
        _encode_to(path, backbone, ids, on_progress)
    elif on_progress is not None:
        on_progress(len(ids), len(ids))
    return ids.with_values(np.load(path, mmap_mode="r"))


def _key(backbone: Backbone, ids: TokenBatch) -> str:
    return fingerprint_of(
        {
            "version": FEATURES_VERSION,
            "backbone": asdict(backbone.identity),
            "ids": sha256(np.ascontiguousarray(ids.values, dtype="<i4").tobytes()).hexdigest(),
            "lengths": sha256(np.ascontiguousarray(ids.lengths, dtype="<i4").tobytes()).hexdigest(),
        }
    )


def _encode_to(path: Path, backbone: Backbone, ids: TokenBatch, on_progress: OnProgress | None) -> None:
    """Encode chunk by chunk into a partial file that takes its name once it is whole."""
    partial, mark = path.with_suffix(".partial"), path.with_suffix(".progress")
    offsets = ids.offsets
    shape = (int(offsets[-1]), backbone.width)
    done = int(mark.read_text()) if partial.exists() and mark.exists() else 0
    states = np.lib.format.open_memmap(partial, mode="r+" if done else "w+", dtype=np.float16, shape=shape)
    for start in range(done, len(ids), CHUNK_SEQUENCES):
        end = min(start + CHUNK_SEQUENCES, len(ids))
        rows = backbone.encode(ids.select(np.arange(start, end))).float().cpu().numpy()
        states[offsets[start] : offsets[end]] = _as_fp16(rows)
        states.flush()
        _write_atomically(mark, str(end))
        if on_progress is not None:
            on_progress(end, len(ids))
    del states
    partial.replace(path)
    mark.unlink(missing_ok=True)


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
