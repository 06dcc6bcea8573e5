"""From projected rows to logits: the part of the model that runs after the encoder, in one process or in another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenalign.devices import to_device, to_host
from tokenalign.head import AlignmentHead
from tokenalign.labels import LabelSet
from tokenalign.maxsim import best_description, matches, maxsim
from tokenalign.results import FloatArray, LabelAlignment
from tokenalign.text import TokenizedTexts
from tokenalign.tokens import IntArray, TokenBatch, compact, offsets_of, ragged_positions

# Cosines held at a time, 128 MiB of fp32: 1,024 full texts against 2,048 labels would be several gigabytes at once.
MAX_SIMILARITIES = 2**25


@dataclass(frozen=True, slots=True, eq=False)
class LabelQueries:
    """The label side of a candidate list, as it is cached: it depends on each description alone.

    values: `[kept label tokens, width]` fp16 (fp32 where that would overflow) unit rows
    lengths: `[descriptions]` int32, kept tokens of each
    """

    values: NDArray[Any]
    lengths: IntArray

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, indices: Sequence[int]) -> "LabelQueries":
        """The descriptions at `indices`, in that order."""
        chosen = TokenBatch(self.values, self.lengths, np.ones(len(self.values), dtype=np.bool_)).select(indices)
        return LabelQueries(chosen.values, chosen.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class DocumentKeys:
    """The document side: `[kept tokens, width]` fp32 unit rows on the head's device; `[documents]` int32 lengths."""

    values: Tensor
    lengths: IntArray

    def slice(self, index: int) -> Tensor:
        """`[kept, width]` rows of one document."""
        start, end = offsets_of(self.lengths)[index : index + 2]
        return self.values[start:end]

    def select(self, indices: Sequence[int]) -> "DocumentKeys":
        """The documents at `indices`, in that order."""
        if list(indices) == list(range(len(self.lengths))):
            return self
        chosen = np.asarray(indices, dtype=np.int64)
        positions = ragged_positions(offsets_of(self.lengths)[chosen], self.lengths[chosen])
        return DocumentKeys(self.values[to_device(positions, self.values.device)], self.lengths[chosen])

    def merged(self, counts: IntArray) -> "DocumentKeys":
        """Runs of consecutive sequences as one document each: the windows of a text. counts: `[documents]`, >= 1."""
        if len(counts) == len(self.lengths):
            return self
        starts = offsets_of(counts)[:-1]
        return DocumentKeys(self.values, np.add.reduceat(self.lengths, starts).astype(np.int32))

    def parts(self, max_tokens: int) -> "Iterator[DocumentKeys]":
        """The documents in order, in runs of at most `max_tokens` tokens, or of one document; at least one run."""
        offsets = offsets_of(self.lengths)
        start = 0
        while True:
            end = max(start + 1, int(np.searchsorted(offsets, offsets[start] + max_tokens, side="right")) - 1)
            yield DocumentKeys(
                self.values[offsets[start] : offsets[min(end, len(self.lengths))]], self.lengths[start:end]
            )
            start = end
            if start >= len(self.lengths):
                return


class Aligner:
    """Scores documents against labels with a head and its temperature. Deterministic; computes no gradients.

    On CUDA the sums over a label's tokens are taken in no fixed order, so there equal calls are equal up to rounding.
    """

    def __init__(self, head: AlignmentHead, temperature: float) -> None:
        self._head = head.eval().requires_grad_(False)
        self._factor = float(head.scale) / temperature

    @torch.inference_mode()
    def project(self, states: Tensor, what: str) -> NDArray[Any]:
        """`[tokens, width]` projected rows of `[tokens, D]` states, compacted; `NumericalError` names `what`."""
        return compact(to_host(self._head.project(states.to(self._head.device))), what)

    @torch.inference_mode()
    def label_queries(self, projected: TokenBatch) -> LabelQueries:
        """The cacheable label side of descriptions, from their projected rows."""
        rows = self._head.queries(self._head.contextualize_ragged(projected))
        return LabelQueries(compact(to_host(rows), "label rows"), projected.kept().lengths)

    @torch.inference_mode()
    def document_keys(self, projected: TokenBatch) -> DocumentKeys:
        """The document side, from projected rows."""
        return DocumentKeys(self._head.keys(self._head.contextualize_ragged(projected)), projected.kept().lengths)

    @torch.inference_mode()
    def logits(self, labels: LabelSet, queries: LabelQueries, keys: DocumentKeys) -> FloatArray:
        """`[documents, labels]` calibrated logits; queries are in the order of `labels.descriptions`."""
        device = self._head.device
        rows, lengths = _tensor(queries.values, np.float32, device), _tensor(queries.lengths, np.int64, device)
        similarity = torch.cat(
            [
                maxsim(rows, lengths, part.values, _tensor(part.lengths, np.int64, device))
                for part in keys.parts(max(1, MAX_SIMILARITIES // max(1, len(rows))))
            ]
        )
        owners = torch.tensor(labels.owners, device=device)
        result: FloatArray = (best_description(similarity, owners, len(labels)) * self._factor).cpu().numpy()
        return result

    @torch.inference_mode()
    def align(
        self, labels: LabelSet, label: int, tokenized: TokenizedTexts, queries: LabelQueries, keys: Tensor
    ) -> LabelAlignment:
        """Where the tokens of one label matched in one document.

        tokenized: the label set's descriptions; keys: `[kept, width]` of the document. Of several descriptions the one
        with the largest logit is shown, the first of equals.
        """
        offsets = offsets_of(queries.lengths)
        best: LabelAlignment | None = None
        for d in (i for i, owner in enumerate(labels.owners) if owner == label):
            rows = _tensor(queries.values[offsets[d] : offsets[d + 1]], np.float32, keys.device)
            found = matches(rows, keys)
            similarity = found.similarity.cpu().numpy()
            alignment = LabelAlignment(
                description=d,
                label_spans=tokenized.kept_spans(d),
                key_index=found.key_index.cpu().numpy(),
                similarity=similarity,
                median=found.median.cpu().numpy(),
                contribution=similarity * np.float32(self._factor / len(similarity)),
            )
            if best is None or alignment.contribution.sum() > best.contribution.sum():
                best = alignment
        assert best is not None, f"label {label} has no description"  # noqa: S101  LabelSet.of refuses that
        return best


def _tensor(array: NDArray[Any], dtype: type[np.generic], device: torch.device) -> Tensor:
    """A copy as a tensor: arrays from a cache or another process are read-only, which torch can't share."""
    return to_device(array.astype(dtype), device)
