"""The classifier: texts and candidate labels in, answers out, in one process."""

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, overload

from tokenalign.backbone import DEFAULT_MAX_BATCH_TOKENS, Backbone, DType
from tokenalign.config import ModelConfig
from tokenalign.errors import InputError
from tokenalign.foreign import ForeignOverrides
from tokenalign.head import AlignmentHead
from tokenalign.labels import Label, LabelSet, check_text
from tokenalign.references import resolve_backbone
from tokenalign.results import (
    Classification,
    Explain,
    check_explain,
    check_top_k,
    classification,
    explained_labels,
    label_warnings,
    match_list,
    ranking,
    softmax,
)
from tokenalign.scoring import Aligner, LabelQueries
from tokenalign.text import TextTokenizer, TokenizedTexts
from tokenalign.tokens import TokenBatch
from tokenalign.weights import label_fingerprint, load_head, locate_head, model_fingerprint, save_head

CACHED_LISTS = 8
CHUNK_TEXTS = 1_024  # texts that are held as token states at a time
MAX_TEXT_CHARS = 100_000

Labels = Iterable[str | Label | Mapping[str, Any]] | LabelSet


@dataclass(frozen=True, slots=True, eq=False)
class _PreparedLabels:
    tokenized: TokenizedTexts
    queries: LabelQueries


class TokenAlignClassifier:
    """Scores texts against label descriptions that come with each call.

    Load it once and reuse it: `classifier(text, labels)` gives one `Classification`, `classifier([text, …], labels)` a
    list of them, in order. The label side of the eight most recent candidate lists is kept.
    """

    def __init__(
        self, config: ModelConfig, backbone: Backbone, tokenizer: TextTokenizer, head: AlignmentHead, head_digest: str
    ) -> None:
        self.config = config
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.head = head.to(backbone.device)
        labels_print = label_fingerprint(config, backbone.identity, tokenizer.digest, head_digest)
        self.fingerprint = model_fingerprint(labels_print, config)
        self._aligner = Aligner(self.head, config.temperature)
        self._prepared: OrderedDict[tuple[str, ...], _PreparedLabels] = OrderedDict()
        self._lock = Lock()

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
        return cls(config, encoder, tokenizer, head, digest)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the head's config.json and model.safetensors; the backbone stays a reference."""
        save_head(Path(folder), self.config, self.head)

    def clear_label_cache(self) -> None:
        """Release the kept label representations."""
        with self._lock:
            self._prepared.clear()

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too; the first match is the right one
        self,
        texts: str,
        labels: Labels,
        *,
        explain: Explain = ...,
        return_logits: bool = ...,
        top_k: int | None = ...,
        max_batch_tokens: int = ...,
    ) -> Classification: ...

    @overload
    def __call__(
        self,
        texts: Sequence[str],
        labels: Labels,
        *,
        explain: Explain = ...,
        return_logits: bool = ...,
        top_k: int | None = ...,
        max_batch_tokens: int = ...,
    ) -> list[Classification]: ...

    def __call__(
        self,
        texts: str | Sequence[str],
        labels: Labels,
        *,
        explain: Explain = False,
        return_logits: bool = False,
        top_k: int | None = None,
        max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS,
    ) -> Classification | list[Classification]:
        """One answer for a string, a list of answers for a list, in order.

        explain: True adds the matches of the best label, "all" of every label that is returned
        top_k: return only so many labels; scores are over all of them still
        Raises `InputError` that names the text or label at fault.
        """
        check_explain(explain)
        check_top_k(top_k)
        candidates = LabelSet.of(labels, min_labels=1 if return_logits else 2)
        single = isinstance(texts, str)
        checked = (
            [check_text(texts, ("text",), MAX_TEXT_CHARS)]
            if isinstance(texts, str)
            else [check_text(text, ("texts", i), MAX_TEXT_CHARS) for i, text in enumerate(_as_list(texts))]
        )
        prepared = self._prepare(candidates)
        warnings = label_warnings(candidates, prepared.tokenized)
        answers: list[Classification] = []
        for start in range(0, len(checked), CHUNK_TEXTS):
            chunk = checked[start : start + CHUNK_TEXTS]
            distinct = list(dict.fromkeys(chunk))
            position = {text: i for i, text in enumerate(distinct)}
            try:
                tokenized = self.tokenizer.documents(distinct)
            except InputError as error:
                bad = chunk.index(distinct[int(error.loc[-1])]) + start
                raise InputError(error.message, ("text",) if single else ("texts", bad)) from error
            keys = self._aligner.document_keys(self._project(tokenized.tokens, max_batch_tokens, "texts"))
            logits = self._aligner.logits(candidates, prepared.queries, keys)
            scores = softmax(logits)
            for text in chunk:
                i = position[text]
                matches = None
                if explain:
                    wanted = explained_labels(ranking(logits[i], top_k), explain)
                    alignments = [
                        self._aligner.align(candidates, c, prepared.tokenized, prepared.queries, keys.slice(i))
                        for c in wanted
                    ]
                    matches = match_list(candidates, alignments, text, tokenized.kept_spans(i))
                answers.append(
                    classification(
                        candidates,
                        logits[i],
                        scores[i],
                        top_k=top_k,
                        return_logits=return_logits,
                        truncation=tokenized.truncations[i],
                        matches=matches,
                        warnings=list(warnings),
                    )
                )
        return answers[0] if single else answers

    def _project(self, tokens: TokenBatch, max_batch_tokens: int, what: str) -> TokenBatch:
        states = self.backbone.encode(tokens, max_batch_tokens=max_batch_tokens)
        return tokens.with_values(self._aligner.project(states, what))

    def _prepare(self, labels: LabelSet) -> _PreparedLabels:
        key = labels.descriptions
        with self._lock:
            if key in self._prepared:
                self._prepared.move_to_end(key)
                return self._prepared[key]
        tokenized = self._tokenize_labels(labels)
        projected = self._project(tokenized.tokens, DEFAULT_MAX_BATCH_TOKENS, "labels")
        prepared = _PreparedLabels(tokenized, self._aligner.label_queries(projected))
        with self._lock:
            self._prepared[key] = prepared
            while len(self._prepared) > CACHED_LISTS:
                self._prepared.popitem(last=False)
        return prepared

    def _tokenize_labels(self, labels: LabelSet) -> TokenizedTexts:
        try:
            return self.tokenizer.labels(labels.descriptions)
        except InputError as error:
            raise InputError(error.message, labels.location(int(error.loc[-1]))) from error


def _as_list(texts: object) -> list[object]:
    if isinstance(texts, (bytes, Mapping)) or not isinstance(texts, Iterable):
        raise InputError(f"must be a string or a list of strings, not {type(texts).__name__}", ("texts",))
    return list(texts)
