"""The linear classifier: texts in, labels out, in one process."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch

from tokenalign.abstention import Abstention, Thresholds
from tokenalign.backbone import DEFAULT_MAX_BATCH_TOKENS, Backbone, DType
from tokenalign.errors import InputError
from tokenalign.labels import LabelSet, check_text
from tokenalign.linear.config import LinearConfig
from tokenalign.linear.head import LinearHead, label_wise_maximum, probabilities, window_logits
from tokenalign.linear.pooling import pooled_states
from tokenalign.linear.reading import Reading
from tokenalign.linear.weights import linear_fingerprint, load_linear, save_linear
from tokenalign.parallel import ComputePool
from tokenalign.references import resolve_backbone
from tokenalign.results import Classification, FloatArray, Warning_, WindowReport, check_top_k, classification, ranking
from tokenalign.text import TextTokenizer, Windowed
from tokenalign.tokens import offsets_of
from tokenalign.weights import locate_head

CHUNK_TEXTS = 1_024
MAX_SHARD_WINDOWS = 256  # whose token states are held at a time: 256 windows of 256 tokens of width 1,024 are 256 MiB
MIN_SHARD_WINDOWS = 8  # that are worth a core of their own
MAX_TEXT_CHARS = 100_000


class LinearClassification(Classification):
    """The answer for one text. labels: best first, the one of a softmax or all that reach the threshold.

    label is the first of them; None, with `abstained`, where no label reaches the threshold.
    """

    labels: list[str]


@dataclass(frozen=True, slots=True)
class _Asked:
    threshold: float | None
    top_k: int | None
    return_logits: bool


class LinearClassifier:
    """Gives texts the labels that its head was trained on. Load it once and reuse it."""

    def __init__(
        self, config: LinearConfig, backbone: Backbone, tokenizer: TextTokenizer, head: LinearHead, digest: str
    ) -> None:
        self.config = config
        self.labels = LabelSet.of(config.labels, min_labels=1)
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.head = head.to(backbone.device)
        self.fingerprint = linear_fingerprint(config, backbone.identity, tokenizer.digest, digest)
        self._reading = Reading.of(config)
        self._pool = ComputePool(torch.get_num_threads() if backbone.device.type == "cpu" else 1)

    @classmethod
    def from_pretrained(
        cls,
        id_or_path: str | os.PathLike[str],
        *,
        device: str = "auto",
        dtype: DType = "auto",
        revision: str | None = None,
        backbone: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
    ) -> "LinearClassifier":
        """The classifier of a linear head: a folder or a hub id.

        backbone: a folder (or other reference) to take the encoder from instead of the one that the head names; a
        sha256 that the head states must still hold
        Raises `ConfigError`, `CheckpointError` or `BackboneError`, each saying what doesn't fit and what to do.
        """
        folder = locate_head(id_or_path, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only)
        config, head, digest = load_linear(folder)
        if backbone is not None:
            config = config.with_backbone(backbone)
        options: dict[str, Any] = {"base": folder, "cache_dir": cache_dir, "local_files_only": local_files_only}
        encoder = Backbone.load(config.encoder, device=device, dtype=dtype, **options)
        tokenizer = TextTokenizer.load(resolve_backbone(config.backbone, **options), config.encoder)
        return cls(config, encoder, tokenizer, head, digest)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the head's config.json and model.safetensors; the backbone stays a reference."""
        save_linear(Path(folder), self.config, self.head)

    @overload
    def classify(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too; the first match is the right one
        self,
        texts: str,
        *,
        threshold: float | None = None,
        top_k: int | None = None,
        return_logits: bool = False,
        max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS,
    ) -> LinearClassification: ...

    @overload
    def classify(
        self,
        texts: Sequence[str],
        *,
        threshold: float | None = None,
        top_k: int | None = None,
        return_logits: bool = False,
        max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS,
    ) -> list[LinearClassification]: ...

    def classify(
        self,
        texts: str | Sequence[str],
        *,
        threshold: float | None = None,
        top_k: int | None = None,
        return_logits: bool = False,
        max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS,
    ) -> LinearClassification | list[LinearClassification]:
        """One answer for a string, a list of answers for a list, in order; `scores` are probabilities.

        threshold: the probability from which on a label is given, instead of the head's own; for a head of mode
            "multi_label" alone. The head's own comes with a warning where it is unstable.
        top_k: return only so many scores; `labels` is whole still
        A text longer than a window is read in windows that overlap; each label's logit is its largest over them.
        Raises `InputError` that names the text or option at fault.
        """
        check_top_k(top_k)
        asked = _Asked(self._checked_threshold(threshold), top_k, return_logits)
        single = isinstance(texts, str)
        given: list[object] = [texts] if isinstance(texts, str) else list(texts)
        locs = [("text",) if single else ("texts", i) for i in range(len(given))]
        checked = [check_text(text, loc, MAX_TEXT_CHARS) for text, loc in zip(given, locs, strict=True)]
        answers: list[LinearClassification] = []
        for start in range(0, len(checked), CHUNK_TEXTS):
            try:
                windowed = self._reading.windows(self.tokenizer, checked[start : start + CHUNK_TEXTS])
            except InputError as error:
                raise InputError(error.message, locs[start + int(error.loc[-1])]) from error
            answers += self._answers(windowed, self._logits(windowed, max_batch_tokens), asked)
        warnings = self._warnings(threshold)
        for answer in answers:
            answer["warnings"] = list(warnings)
        return answers[0] if single else answers

    def _checked_threshold(self, given: float | None) -> float | None:
        chosen = self.config.threshold
        if given is None:
            return None if chosen is None else chosen.threshold
        if chosen is None:
            raise InputError(
                f'the head {self.config.name!r} is of mode "single_label", which gives the best label; '
                "leave threshold out",
                ("threshold",),
            )
        try:
            return Thresholds.of(given, fewest_labels=1).min_score
        except InputError as error:
            raise InputError(error.message, ("threshold",)) from error

    def _warnings(self, given: float | None) -> list[Warning_]:
        chosen = self.config.threshold
        message = None if chosen is None or given is not None else chosen.warning
        return [] if message is None else [Warning_(loc=["threshold"], type="unstable", message=message)]

    def _logits(self, windowed: Windowed, max_batch_tokens: int) -> FloatArray:
        """`[windows, labels]`, computed in shares of whole texts, each on a core of its own."""
        tokens = windowed.tokenized.tokens
        share = max(MIN_SHARD_WINDOWS, min(MAX_SHARD_WINDOWS, -(-len(tokens) // self._pool.threads)))

        def score(part: Windowed) -> FloatArray:
            vectors = pooled_states(
                self.backbone, part.tokenized.tokens, self.config.pooling, max_batch_tokens=max_batch_tokens
            )
            return window_logits(self.head, vectors)

        cost = float(len(tokens.values) * self.backbone.token_multiply_adds)
        return np.concatenate(self._pool.map(score, list(windowed.parts(share)), cost))

    def _answers(self, windowed: Windowed, logits: FloatArray, asked: _Asked) -> list[LinearClassification]:
        of_texts = label_wise_maximum(logits, windowed.counts)
        scores = probabilities(of_texts, self.config)
        starts = offsets_of(windowed.counts)
        return [
            self._answer(
                of_texts[i], scores[i], _windows(windowed, i, logits[starts[i] : starts[i + 1]], of_texts[i]), asked
            )
            for i in range(len(windowed))
        ]

    def _answer(
        self, logits: FloatArray, scores: FloatArray, windows: WindowReport | None, asked: _Asked
    ) -> LinearClassification:
        order = ranking(logits, None).tolist()
        best = float(scores[order[0]])
        chosen, abstained = order[:1], None
        if asked.threshold is not None:
            chosen = [i for i in order if scores[i] >= asked.threshold]
            if not chosen:
                abstained = Abstention(reason="min_score", value=best, limit=asked.threshold)
        answer = classification(
            self.labels,
            logits,
            scores,
            top_k=asked.top_k,
            return_logits=asked.return_logits,
            truncation=None,
            matches=None,
            warnings=[],
            abstained=abstained,
            windows=windows,
        )
        return LinearClassification(**answer, labels=[self.labels.names[i] for i in chosen])


def _windows(windowed: Windowed, text: int, logits: FloatArray, largest: FloatArray) -> WindowReport | None:
    """The windows of a text that has several; the best is the one that gave the best label its logit."""
    if len(logits) == 1:
        return None
    return WindowReport(
        count=len(logits),
        best=int(logits[:, largest.argmax()].argmax()),
        spans=windowed.window_spans(text).tolist(),
    )
