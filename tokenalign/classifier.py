"""The classifier: texts and candidate labels in, answers out, in one process."""

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, TypedDict, Unpack, overload

import numpy as np
import torch

from tokenalign.abstention import MinScore, Thresholds
from tokenalign.backbone import DEFAULT_MAX_BATCH_TOKENS, Backbone, DType
from tokenalign.config import ModelConfig, MultiLabelCalibration
from tokenalign.errors import InputError, Loc
from tokenalign.foreign import ForeignOverrides
from tokenalign.head import AlignmentHead
from tokenalign.hub import push_head
from tokenalign.labels import Label, LabelSet, check_text, has_label_sets, label_sets
from tokenalign.long_text import LongText, LongTextMode
from tokenalign.parallel import ComputePool
from tokenalign.references import local_backbone, resolve_backbone
from tokenalign.results import (
    Classification,
    Explain,
    FloatArray,
    LabelAlignment,
    Warning_,
    WindowReport,
    check_explain,
    check_multi_label,
    check_top_k,
    classification,
    explained_labels,
    label_scores,
    label_warnings,
    match_list,
    min_labels,
    ranking,
    window_report,
)
from tokenalign.scoring import Aligner, DocumentKeys, LabelQueries
from tokenalign.text import DEFAULT_MAX_WINDOWS, TextTokenizer, TokenizedTexts, Windowed
from tokenalign.tokens import TokenBatch, offsets_of
from tokenalign.weights import label_fingerprint, load_head, locate_head, model_fingerprint, save_head

CACHED_LISTS = 8
CHUNK_TEXTS = 1_024  # texts, or windows of texts, that are held as token states at a time
MIN_SHARD_TEXTS = 8  # that are worth a core of their own
MAX_TEXT_CHARS = 100_000

LabelList = Iterable[str | Label | Mapping[str, Any]] | LabelSet
Labels = LabelList | Sequence[LabelList]


class ClassifyOptions(TypedDict, total=False):
    """What can be asked of a call beside texts and labels; see `TokenAlignClassifier.__call__`."""

    explain: Explain
    return_logits: bool
    top_k: int | None
    multi_label: bool
    min_score: MinScore
    min_margin: float | None
    long_text: LongTextMode
    window_stride: int | None
    max_windows: int
    label_template: str | None
    max_batch_tokens: int


@dataclass(frozen=True, slots=True)
class _Asked:
    """The checked options of a call."""

    explain: Explain
    return_logits: bool
    top_k: int | None
    calibration: MultiLabelCalibration | None
    thresholds: Thresholds
    long_text: LongText
    max_batch_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _PreparedLabels:
    tokenized: TokenizedTexts
    queries: LabelQueries

    def select(self, indices: Sequence[int]) -> "_PreparedLabels":
        return _PreparedLabels(self.tokenized.select(indices), self.queries.select(indices))


@dataclass(frozen=True, slots=True, eq=False)
class _Scored:
    """One text's numbers for one label set; logits, scores: `[labels]`; matches are those of `alignments`."""

    logits: FloatArray
    scores: FloatArray
    alignments: list[LabelAlignment]
    windows: WindowReport | None


class TokenAlignClassifier:
    """Scores texts against label descriptions that come with each call.

    Load it once and reuse it: `classifier(text, labels)` gives one `Classification`, `classifier([text, …], labels)` a
    list of them, in order. The label side of the eight most recent candidate lists is kept.
    """

    def __init__(
        self,
        config: ModelConfig,
        backbone: Backbone,
        tokenizer: TextTokenizer,
        head: AlignmentHead,
        head_digest: str,
        *,
        base: Path | None = None,
    ) -> None:
        """base: the folder below which a relative backbone folder is looked for first."""
        self.config = config
        self._base = base
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.head = head.to(backbone.device)
        labels_print = label_fingerprint(config, backbone.identity, tokenizer.digest, head_digest)
        self.fingerprint = model_fingerprint(labels_print, config)
        self._aligner = Aligner(self.head, config.temperature)
        self._prepared: OrderedDict[tuple[str | None, tuple[str, ...]], _PreparedLabels] = OrderedDict()
        self._lock = Lock()
        self._pool = ComputePool(torch.get_num_threads() if backbone.device.type == "cpu" else 1)

    @classmethod
    def from_pretrained(
        cls,
        id_or_path: str | os.PathLike[str] | None = None,
        *,
        device: str = "auto",
        dtype: DType = "auto",
        revision: str | None = None,
        backbone: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        overrides: ForeignOverrides | None = None,
    ) -> "TokenAlignClassifier":
        """The classifier of a head: the shipped default, a shipped head's name, a folder or a hub id.

        backbone: a folder (or other reference) to take the encoder from instead of the one that the head names; a
        sha256 that the head states must still hold
        overrides: names and values for a head that another program wrote, see `tokenalign.foreign`
        Raises `ConfigError`, `CheckpointError` or `BackboneError`, each saying what doesn't fit and what to do.
        """
        folder = locate_head(id_or_path, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only)
        config, head, digest = load_head(folder, overrides=overrides)
        if backbone is not None:
            config = config.with_backbone(backbone)
        options: dict[str, Any] = {"base": folder, "cache_dir": cache_dir, "local_files_only": local_files_only}
        encoder = Backbone.load(config, device=device, dtype=dtype, **options)
        tokenizer = TextTokenizer.load(resolve_backbone(config.backbone, **options), config)
        return cls(config, encoder, tokenizer, head, digest, base=folder)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the head's config.json and model.safetensors; the backbone stays a reference.

        A relative backbone folder is written as an absolute one, since it would name another one from there.
        """
        save_head(Path(folder), self._portable_config(), self.head)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        token: str | bool | None = None,
        endpoint: str | None = None,
    ) -> str:
        """The URL of the commit that holds the head on a model hub; a minimal model card where there is none yet.

        revision: a branch, made if it must be; endpoint: another hub than huggingface_hub's default
        Raises `ConfigError` for a head on an encoder of this machine alone, `CheckpointError` where the hub refuses.
        """
        return push_head(
            self._portable_config(),
            self.head,
            repo_id,
            private=private,
            revision=revision,
            commit_message=commit_message,
            token=token,
            endpoint=endpoint,
        )

    def _portable_config(self) -> ModelConfig:
        reference = self.config.backbone.reference
        folder = local_backbone(reference, self._base)
        if folder is None or Path(reference).is_absolute():
            return self.config
        backbone = self.config.backbone.model_copy(update={"reference": str(folder.resolve())})
        return self.config.model_copy(update={"backbone": backbone})

    def clear_label_cache(self) -> None:
        """Release the kept label representations."""
        with self._lock:
            self._prepared.clear()

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too; the first match is the right one
        self, texts: str, labels: Labels, **options: Unpack[ClassifyOptions]
    ) -> Classification: ...

    @overload
    def __call__(
        self, texts: Sequence[str], labels: Labels, **options: Unpack[ClassifyOptions]
    ) -> list[Classification]: ...

    def __call__(
        self,
        texts: str | Sequence[str],
        labels: Labels,
        *,
        explain: Explain = False,
        return_logits: bool = False,
        top_k: int | None = None,
        multi_label: bool = False,
        min_score: MinScore = None,
        min_margin: float | None = None,
        long_text: LongTextMode = "truncate",
        window_stride: int | None = None,
        max_windows: int = DEFAULT_MAX_WINDOWS,
        label_template: str | None = None,
        max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS,
    ) -> Classification | list[Classification]:
        """One answer for a string, a list of answers for a list, in order.

        labels: the candidates of all texts, or a list of lists: those of each text
        explain: True adds the matches of the best label, "all" of every label that is returned
        top_k: return only so many labels; scores are over all of them still
        multi_label: each score is the probability that its label holds, whatever the other candidates, instead of a
            softmax over them; one label is then enough, and the model must have a calibration for it
        min_score, min_margin: the least score of the best label, and its least lead over the second best; where it is
            lower, `label` is None and `abstained` says why; min_score "calibrated" is the limit fitted with the model
        long_text: of a text that has too many tokens, "truncate" cuts the end and says so, "window" reads all of it in
            windows that overlap, at most `max_windows`, and "error" refuses it
        window_stride: tokens from one window's start to the next's; half a window by default
        label_template: words around each label instead of the model's own, holding `{label}`; they are never scored
        Raises `InputError` that names the text, label or option at fault.
        """
        check_explain(explain)
        check_top_k(top_k)
        calibration = check_multi_label(multi_label, self.config)
        reading = LongText.of(long_text, window_stride, max_windows, window_tokens=self.tokenizer.window_tokens)
        single = isinstance(texts, str)
        given: list[object] = [texts] if isinstance(texts, str) else _as_list(texts)
        fewest = min_labels(return_logits=return_logits, multi_label=multi_label)
        sets = label_sets(labels, len(given), min_labels=fewest)
        thresholds = Thresholds.of(min_score, min_margin, fewest_labels=min(len(candidates) for candidates in sets))
        thresholds = thresholds.resolved(self.config, multi_label=multi_label)
        locs = [("text",) if single else ("texts", i) for i in range(len(given))]
        checked = [check_text(text, loc, MAX_TEXT_CHARS) for text, loc in zip(given, locs, strict=True)]
        asked = _Asked(explain, return_logits, top_k, calibration, thresholds, reading, max_batch_tokens)
        prepared, warnings = self._label_sides(sets, has_label_sets(labels), label_template)
        answers: list[Classification] = []
        for start in range(0, len(checked), CHUNK_TEXTS):
            chunk = checked[start : start + CHUNK_TEXTS]
            owners = list(range(start, start + len(chunk))) if len(sets) > 1 else [0] * len(chunk)
            try:
                answers += self._answer_chunk(chunk, [sets[i] for i in owners], prepared, asked)
            except InputError as error:
                if error.loc[:1] != ("texts",):
                    raise
                raise InputError(error.message, locs[start + int(error.loc[1])]) from error
            for answer, owner in zip(answers[start:], owners, strict=True):
                answer["warnings"] = list(warnings[owner])
        return answers[0] if single else answers

    def _answer_chunk(
        self,
        texts: Sequence[str],
        sets: Sequence[LabelSet],
        prepared: Mapping[LabelSet, _PreparedLabels],
        asked: _Asked,
    ) -> list[Classification]:
        """The answers to texts that are encoded together, each with its own label set; equal texts once."""
        distinct = list(dict.fromkeys(texts))
        position = {text: i for i, text in enumerate(distinct)}
        try:
            windowed = asked.long_text.read(self.tokenizer, distinct)
        except InputError as error:
            raise InputError(error.message, ("texts", texts.index(distinct[int(error.loc[-1])]))) from error
        wanted: dict[LabelSet, set[int]] = {}
        for text, labels in zip(texts, sets, strict=True):
            wanted.setdefault(labels, set()).add(position[text])
        tokens = windowed.tokenized.tokens
        shard = max(MIN_SHARD_TEXTS, min(CHUNK_TEXTS, -(-len(tokens) // self._pool.threads)))
        parts = list(windowed.parts(shard))
        firsts = offsets_of(np.array([len(part) for part in parts]))[:-1].tolist()

        def score(part: Windowed, first: int) -> dict[tuple[LabelSet, int], _Scored]:
            projected = self._project(part.tokenized.tokens, asked.max_batch_tokens, "texts")
            keys = self._aligner.document_keys(projected).merged(part.counts)
            scored: dict[tuple[LabelSet, int], _Scored] = {}
            for labels, documents in wanted.items():
                rows = sorted(i - first for i in documents if first <= i < first + len(part))
                if rows:
                    found = self._score(labels, prepared[labels], part, keys, rows, asked)
                    scored |= {(labels, first + row): one for row, one in zip(rows, found, strict=True)}
            return scored

        cost = float(len(tokens.values) * self.backbone.token_multiply_adds)
        of_parts = self._pool.map(lambda job: score(*job), list(zip(parts, firsts, strict=True)), cost)
        scored = {asked_of: one for of_part in of_parts for asked_of, one in of_part.items()}
        return [
            _classification(text, labels, scored[labels, position[text]], windowed, position[text], asked)
            for text, labels in zip(texts, sets, strict=True)
        ]

    def _score(
        self,
        labels: LabelSet,
        prepared: _PreparedLabels,
        windowed: Windowed,
        keys: DocumentKeys,
        rows: Sequence[int],
        asked: _Asked,
    ) -> list[_Scored]:
        """The numbers of the documents at `rows` for one label set."""
        logits = self._aligner.logits(labels, prepared.queries, keys.select(rows))
        scores = label_scores(logits, asked.calibration)
        found = []
        for i, row in enumerate(rows):
            order = ranking(logits[i], asked.top_k)
            in_windows = asked.long_text.mode == "window"
            alignments = [
                self._aligner.align(labels, c, prepared.tokenized, prepared.queries, keys.slice(row))
                for c in explained_labels(order, asked.explain or in_windows)
            ]
            windows = window_report(windowed, row, alignments[0]) if in_windows else None
            found.append(_Scored(logits[i], scores[i], alignments if asked.explain else [], windows))
        return found

    def _project(self, tokens: TokenBatch, max_batch_tokens: int, what: str) -> TokenBatch:
        states = self.backbone.encode(tokens, max_batch_tokens=max_batch_tokens)
        return tokens.with_values(self._aligner.project(states, what))

    def _label_sides(
        self, sets: Sequence[LabelSet], per_text: bool, template: str | None
    ) -> tuple[dict[LabelSet, _PreparedLabels], list[list[Warning_]]]:
        """The label side of every set, and the warnings of each; the descriptions of all sets are encoded together."""
        descriptions = tuple(dict.fromkeys(d for labels in sets for d in labels.descriptions))
        try:
            together = self._prepare(descriptions, None if template == self.config.label_template else template)
        except InputError as error:
            if error.loc[:1] != ("labels",):
                raise
            raise InputError(error.message, _location(descriptions[int(error.loc[-1])], sets, per_text)) from error
        if len(sets) == 1:
            prepared = {sets[0]: together}
        else:
            row = {description: i for i, description in enumerate(descriptions)}
            prepared = {labels: together.select([row[d] for d in labels.descriptions]) for labels in set(sets)}
        warnings = [
            label_warnings(labels, prepared[labels].tokenized, ("labels", i) if per_text else ("labels",))
            for i, labels in enumerate(sets)
        ]
        return prepared, warnings

    def _prepare(self, descriptions: tuple[str, ...], template: str | None) -> _PreparedLabels:
        key = (template, descriptions)
        with self._lock:
            if key in self._prepared:
                self._prepared.move_to_end(key)
                return self._prepared[key]
        tokenized = self.tokenizer.labels(descriptions, template=template)
        projected = self._project(tokenized.tokens, DEFAULT_MAX_BATCH_TOKENS, "labels")
        prepared = _PreparedLabels(tokenized, self._aligner.label_queries(projected))
        with self._lock:
            self._prepared[key] = prepared
            while len(self._prepared) > CACHED_LISTS:
                self._prepared.popitem(last=False)
        return prepared


def _classification(
    text: str, labels: LabelSet, scored: _Scored, windowed: Windowed, document: int, asked: _Asked
) -> Classification:
    """The answer for one text, its warnings still to come."""
    return classification(
        labels,
        scored.logits,
        scored.scores,
        top_k=asked.top_k,
        return_logits=asked.return_logits,
        truncation=None if scored.windows is not None else windowed.tokenized.truncations[document],
        matches=match_list(labels, scored.alignments, text, windowed.kept_spans(document)) if asked.explain else None,
        warnings=[],
        abstained=asked.thresholds.abstention(scored.scores),
        windows=scored.windows,
    )


def _location(description: str, sets: Sequence[LabelSet], per_text: bool) -> Loc:
    """Where a description first stands in what the caller sent."""
    i, labels = next((i, labels) for i, labels in enumerate(sets) if description in labels.descriptions)
    loc = labels.location(labels.descriptions.index(description))
    return (*loc[:1], i, *loc[1:]) if per_text else loc


def _as_list(texts: object) -> list[object]:
    if isinstance(texts, (bytes, Mapping)) or not isinstance(texts, Iterable):
        raise InputError(f"must be a string or a list of strings, not {type(texts).__name__}", ("texts",))
    return list(texts)
