"""The scorer deployment: encoded rows and label sets in, scores out. A plain class; `app.py` puts it on Ray Serve."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deploy.health import BusyShare, WatchedWorker
from deploy.label_cache.cache import LabelCache, ListMemory, Variant
from deploy.label_cache.codec import LabelRows
from deploy.label_cache.lru import ByteLru
from deploy.label_cache.metrics import LOOKUP_SECONDS, cache_readings, store_readings
from deploy.label_cache.stats import CacheStats
from deploy.label_cache.store import Store
from deploy.label_lint import near_duplicates
from deploy.label_sets import LABEL_BYTES
from deploy.metrics import SCORER_STAGE_SECONDS, TRUNCATED_LABELS, ModelInfo
from deploy.model import Models, ServedModel, served_models
from deploy.settings import Settings
from deploy.telemetry import NoSink, Reading, Sink
from deploy.tracing import NO_TRACER, Span, Tracer
from deploy.trail import current_trail, working_for
from deploy.wire import (
    Answer,
    AskedLabels,
    EncodeBatch,
    EncodedRows,
    EncoderIdentity,
    LabelReport,
    PackedLabels,
    Priority,
    Question,
    ReplicaLostError,
    ScoreBatch,
    ScoredBatch,
    check_fingerprint,
)
from deploy.workers import available_cores, give_way
from tokenalign.backbone import BackboneIdentity, resolve_device
from tokenalign.config import MultiLabelCalibration
from tokenalign.errors import BackboneError, ConfigError, FingerprintMismatchError, InputError, TokenAlignError
from tokenalign.labels import LabelSet
from tokenalign.results import (
    FloatArray,
    Warning_,
    explained_labels,
    independent_scores,
    label_warnings,
    ranking,
    softmax,
)
from tokenalign.scoring import Aligner, DocumentKeys, LabelQueries
from tokenalign.text import TokenizedTexts
from tokenalign.tokens import TokenBatch
from tokenalign.weights import label_fingerprint

NICENESS = 3  # of the computing thread, below the encoder's
REMEMBERED_SETS = 256  # label sets whose tokens and warnings a replica keeps at hand
REMEMBERED_LABEL_BYTES = 64 * 1024 * 1024  # of label sets that needn't be unpacked again

Describe = Callable[[], Awaitable[EncoderIdentity]]
Encode = Callable[[EncodeBatch], Awaitable[EncodedRows]]


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """What a label set is besides its rows."""

    tokenized: TokenizedTexts
    warnings: tuple[Warning_, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """The label side of a label set, ready to be scored."""

    labels: LabelSet
    known: _Known
    queries: LabelQueries
    report: LabelReport


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """A head, ready to score with, on the device that scores."""

    served: ServedModel
    aligner: Aligner

    @classmethod
    def of(cls, served: ServedModel, device: torch.device) -> "_Head":
        return cls(served, Aligner(served.head.to(device), served.config.temperature))

    def projected(self, rows: EncodedRows) -> NDArray[Any]:
        """`[tokens, width]` rows behind the head's projection, wherever that runs."""
        if rows.projected:
            return rows.values
        return self.aligner.project(torch.from_numpy(rows.values.astype(np.float32)), "rows")


@dataclass(frozen=True, slots=True, eq=False)
class _Model:
    """What this replica holds for one head on the encoder that it works with."""

    head: _Head
    backbone: BackboneIdentity
    fingerprint: str
    cache: LabelCache


class Scorer:
    """Looks up label rows, and scores documents with them on a computing thread of its own, on `model.scorer_device`.

    Rows lie in the host's memory, cached ones too; they go to the device with each batch.
    encode, describe: reach the encoder; store: where label rows are shared with other replicas, or None
    sink, tracer: are told how long each look-up and batch took; what is counted is in `stats` and `readings`
    """

    def __init__(
        self,
        settings: Settings,
        encode: Encode,
        describe: Describe,
        store: Store | None,
        model: ServedModel | Models | None = None,
        sink: Sink | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._settings = settings
        self._encode = encode
        self._describe = describe
        self._store = store
        self._sink = sink or NoSink()
        self._tracer = tracer
        self._stats = CacheStats()
        self._truncated_labels = 0
        self._model_info = ModelInfo()
        device = scoring_device(settings.model.scorer_device)
        served_by_name = served_models(settings.model, model)
        self._names = list(served_by_name)
        self._heads = [_Head.of(served, device) for served in served_by_name.values()]
        torch.set_num_threads(settings.threads.scorer or available_cores())
        self._worker = WatchedWorker(
            "scorer", prepare=partial(give_way, NICENESS), max_pass_s=settings.health.max_pass_s
        )
        self._busy = BusyShare(self._worker)
        self._label_sets: ByteLru[bytes, LabelSet] = ByteLru(REMEMBERED_LABEL_BYTES)
        self._known: OrderedDict[tuple[str, LabelSet, str | None, str | None], _Known] = OrderedDict()
        self._memory: ListMemory = ByteLru(settings.label_cache.memory_bytes)
        self._models: dict[str, _Model] = {}  # by fingerprint, that with the default head first
        self._meeting = asyncio.Lock()

    async def start(self) -> None:
        """Returns once the encoder is known and holds the same model."""
        await self._meet_encoder()

    async def close(self) -> None:
        """Finishes writes to the label store, closes it, and ends the computing thread."""
        await self.drain()
        for model in list(self._models.values())[:1]:  # all have the same store
            await model.cache.close()
        self._worker.stop()

    async def drain(self) -> None:
        """Returns once no look-up of labels and no write to the label store is under way."""
        for model in self._models.values():
            await model.cache.drain()

    async def describe(self) -> str:
        """The fingerprint of the model that this replica scores with, that of its default head."""
        if not self._models:
            await self._meet_encoder()
        return next(iter(self._models))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """How much of the time since it was last asked this replica was computing."""
        return {"busy_share": self._busy.since_last()}

    async def check_health(self) -> None:
        """Raises `UnhealthyError` when this replica gets nowhere any more. Asks nobody, so not the label store."""
        self._worker.check()

    def stats(self) -> CacheStats:
        """What the label cache did since this replica started, whatever models it has served."""
        return self._stats

    def readings(self) -> Iterator[Reading]:
        """The metrics of the label cache, of its store and of labels, and the models served."""
        yield from cache_readings(self._stats)
        yield from store_readings(self._store)
        yield Reading(TRUNCATED_LABELS, self._truncated_labels)
        fingerprints = zip(self._names, self._models, strict=False)  # of none before the start
        yield from self._model_info.readings(dict(fingerprints))

    async def score(self, batch: ScoreBatch) -> ScoredBatch:
        """An answer, or its own error, for each question of the batch, in order.

        The documents are encoded while their labels are looked up. Raises `FingerprintMismatchError` when the batch, or
        what the encoder gives for it, is of another model than this replica's, and `ReplicaLostError`.
        """
        size = {"texts": len(batch.questions), "label_sets": len(batch.label_sets)}
        with self._tracer.work("score", [batch.trail], **size) as span, working_for(span.trail):
            return await self._score(batch, span)

    async def _score(self, batch: ScoreBatch, span: Span) -> ScoredBatch:
        model = await self._of(batch.fingerprint, "the batch of questions")
        started = time.perf_counter()
        rows, sides = await asyncio.gather(
            self._rows(model, replace(batch.documents, trail=span.trail)),
            asyncio.gather(*(self._side(model, asked) for asked in batch.label_sets)),
        )
        gathered = time.perf_counter()
        span.event("rows and labels")
        answers = await self._worker.run(lambda: self._answer(model, rows, batch, sides))
        self._sink.observe(SCORER_STAGE_SECONDS, gathered - started, {"stage": "rows and labels"})
        self._sink.observe(SCORER_STAGE_SECONDS, time.perf_counter() - gathered, {"stage": "scores"})
        return ScoredBatch.of(model.fingerprint, answers)

    async def warm(self, fingerprint: str, labels: LabelSet, tenant: str | None = None) -> LabelReport:
        """What to tell of a label set, its near-duplicates included, once its rows are where every scorer finds them.

        Raises `InputError` at a label without a token, and `FingerprintMismatchError` for a caller of another model.
        """
        model = await self._of(fingerprint, "the label set")
        known = await self._know(model, AskedLabels(PackedLabels.of(labels), None, tenant), labels)
        kept = await model.cache.keep(labels.descriptions, tenant)
        told = {int(w["loc"][1]) for w in known.warnings if w["type"] == "indistinguishable"}
        threshold = self._settings.label_sets.near_duplicate_similarity
        # Beside the computing thread, which answers requests.
        near = await asyncio.to_thread(near_duplicates, labels, kept.rows, threshold, told)
        return LabelReport(kept.hits, (*known.warnings, *near))

    async def _of(self, fingerprint: str, what: str) -> _Model:
        """The model with that fingerprint; an unknown one has the encoder asked what it serves now."""
        if fingerprint not in self._models:
            await self._meet_encoder()
        if fingerprint not in self._models:
            raise FingerprintMismatchError(what, next(iter(self._models))[:12], fingerprint[:12])
        return self._models[fingerprint]

    async def _meet_encoder(self) -> None:
        """Ask the encoder what it serves; each head on a new encoder gets a cache under its own fingerprint."""
        async with self._meeting:
            identity = await self._describe()
            models: dict[str, _Model] = {}
            for head in self._heads:
                fingerprint = head.served.fingerprint(identity.backbone)
                identity.check_serves(fingerprint)
                models[fingerprint] = self._models.get(fingerprint) or _Model(
                    head, identity.backbone, fingerprint, self._open_cache(head, identity.backbone, fingerprint)
                )
            self._models = models

    def _open_cache(self, head: _Head, backbone: BackboneIdentity, fingerprint: str) -> LabelCache:
        options = self._settings.label_cache

        async def encode(descriptions: list[str]) -> LabelRows:
            # For this cache's model and no newer one, whose rows would be kept under the wrong name.
            return await self._encode_labels(head, fingerprint, descriptions, None)

        return LabelCache(
            self._store,
            encode,
            width=head.served.config.width,
            fingerprint=head.served.label_fingerprint(backbone),
            namespace=options.namespace,
            memory=self._memory,
            secret=options.signing_key.read("label_cache.signing_key").encode() if options.signing_key else None,
            ttl_s=options.ttl_s,
            ttl_jitter=options.ttl_jitter,
            store_budget_s=options.store_budget_s,
            lock_ttl_s=options.lock_ttl_s,
            lock_wait_s=options.lock_wait_s,
            stats=self._stats,
        )

    async def _rows(self, model: _Model, documents: EncodeBatch) -> EncodedRows:
        rows = await self._encode(documents)
        check_fingerprint("the encoded rows", model.fingerprint, rows.fingerprint)
        return rows

    async def _side(self, model: _Model, asked: AskedLabels) -> _Side | TokenAlignError:
        """The label side of a set, or the error that is its own.

        Raises what concerns the whole batch and is worth another try: a lost or changed encoder.
        """
        try:
            return await (self._kept_side(model, asked) if asked.keep else self._passing_side(model, asked))
        except (FingerprintMismatchError, ReplicaLostError):
            raise
        except TokenAlignError as error:
            return error

    async def _kept_side(self, model: _Model, asked: AskedLabels) -> _Side:
        labels = self._unpack(asked.labels)
        known = await self._know(model, asked, labels)
        started = time.perf_counter()
        variant = None if asked.template is None else self._variant(model, asked.template)
        with self._tracer.work("labels", [current_trail()], labels=len(labels.descriptions)) as span:
            cached = await model.cache.get(labels.descriptions, asked.tenant, variant)
            span.set("tokenalign.source", cached.source)
        self._sink.observe(LOOKUP_SECONDS, time.perf_counter() - started, {"source": cached.source})
        report = LabelReport(cached.hits, known.warnings)
        return _Side(labels, known, LabelQueries(cached.rows.values, cached.rows.lengths), report)

    async def _passing_side(self, model: _Model, asked: AskedLabels) -> _Side:
        """The label side of a set of which nothing may stay."""
        labels = asked.labels.unpack()
        known = await self._worker.run(lambda: _read(model.head, labels, asked.template))
        rows = await self._encode_labels(model.head, model.fingerprint, list(labels.descriptions), asked.template)
        return _Side(labels, known, LabelQueries(rows.values, rows.lengths), LabelReport(0, known.warnings))

    def _variant(self, model: _Model, template: str) -> Variant:
        """Rows of descriptions in another template: what a head with that template of its own would make and keep."""
        served = model.head.served

        async def encode(descriptions: list[str]) -> LabelRows:
            return await self._encode_labels(model.head, model.fingerprint, descriptions, template)

        config = served.config.model_copy(update={"label_template": template})
        return Variant(label_fingerprint(config, model.backbone, served.tokenizer.digest, served.head_digest), encode)

    def _unpack(self, packed: PackedLabels) -> LabelSet:
        labels = self._label_sets.get(packed.key)
        if labels is None:
            labels = packed.unpack()
            self._label_sets.put(packed.key, labels, len(packed.data) + LABEL_BYTES * len(labels.descriptions))
        return labels

    async def _know(self, model: _Model, asked: AskedLabels, labels: LabelSet) -> _Known:
        """The tokens and warnings of a label set; `InputError` at the label that has no token.

        Remembered for each tenant by itself: a quick answer would tell one what another has asked.
        """
        key = (model.fingerprint, labels, asked.template, asked.tenant)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        known = await self._worker.run(lambda: _read(model.head, labels, asked.template))
        self._truncated_labels += sum(warning["type"] == "truncated" for warning in known.warnings)
        self._known[key] = known
        while len(self._known) > REMEMBERED_SETS:
            self._known.popitem(last=False)
        return known

    async def _encode_labels(
        self, head: _Head, fingerprint: str, descriptions: list[str], template: str | None
    ) -> LabelRows:
        """Fresh label rows: tokenised here, encoded there in chunks behind documents, contextualised here."""
        tokenizer = head.served.tokenizer
        tokens = (await self._worker.run(lambda: tokenizer.labels(descriptions, template=template))).tokens
        chunks, encoded = _chunks(tokens, self._settings.batching.max_batch_tokens), []
        for chunk in chunks:
            rows = await self._encode(EncodeBatch.of(fingerprint, chunk, Priority.LABELS, trail=current_trail()))
            check_fingerprint("the encoded labels", fingerprint, rows.fingerprint)
            encoded.append(rows)

        def contextualise() -> LabelQueries:
            parts = [chunk.with_values(head.projected(rows)) for chunk, rows in zip(chunks, encoded, strict=True)]
            return head.aligner.label_queries(TokenBatch.concat(parts))

        queries = await self._worker.run(contextualise)
        return LabelRows(queries.values, queries.lengths)

    def _answer(
        self, model: _Model, rows: EncodedRows, batch: ScoreBatch, sides: Sequence[_Side | TokenAlignError]
    ) -> list[Answer | TokenAlignError]:
        tokens = TokenBatch(model.head.projected(rows), rows.lengths, batch.keep)
        keys = model.head.aligner.document_keys(tokens).merged(batch.counts)
        answers: dict[int, Answer | TokenAlignError] = {}
        for s, side in enumerate(sides):
            asked = {q: question for q, question in enumerate(batch.questions) if question.labels == s}
            try:
                answers |= dict(zip(asked, self._answer_set(model, side, keys, list(asked.values())), strict=True))
            except TokenAlignError as error:
                answers |= dict.fromkeys(asked, error)
        return [answers[q] for q in range(len(batch.questions))]

    def _answer_set(
        self, model: _Model, side: _Side | TokenAlignError, keys: DocumentKeys, asked: Sequence[Question]
    ) -> list[Answer]:
        """An answer for each question about one label set; raises what concerns all of them."""
        if isinstance(side, TokenAlignError):
            raise side
        aligner = model.head.aligner
        logits = aligner.logits(side.labels, side.queries, keys.select([q.document for q in asked]))
        scores = _scores(logits, asked, model.head.served.config.multi_label)
        orders = ranking(logits, None).astype(np.int32)
        answers: list[Answer] = []
        for row, question in enumerate(asked):
            order = orders[row, : question.top_k]
            document = keys.slice(question.document) if question.explain else None
            alignments = tuple(
                aligner.align(side.labels, label, side.known.tokenized, side.queries, document)
                for label in explained_labels(order, question.explain)
                if document is not None
            )
            answers.append(
                Answer(
                    model.fingerprint,
                    order,
                    scores[row, order],
                    logits[row, order],
                    alignments,
                    side.report,
                    question.thresholds.abstention(scores[row]),
                )
            )
        return answers


def scoring_device(name: str) -> torch.device:
    """The device that `model.scorer_device` names; `ConfigError` where this replica has none."""
    try:
        return resolve_device(name)
    except BackboneError as error:
        raise ConfigError(
            f"model.scorer_device: {error}; for Ray to put a scorer where there is a GPU, give the deployment Scorer a "
            "share of it, ray_actor_options: {num_gpus: 0.2} or more"
        ) from error


def _read(head: _Head, labels: LabelSet, template: str | None) -> _Known:
    try:
        tokenized = head.served.tokenizer.labels(labels.descriptions, template=template)
    except InputError as error:
        if error.loc[:1] != ("labels",):
            raise
        raise InputError(error.message, labels.location(int(error.loc[-1]))) from error
    return _Known(tokenized, tuple(label_warnings(labels, tokenized)))


def _scores(logits: FloatArray, asked: Sequence[Question], calibration: MultiLabelCalibration | None) -> FloatArray:
    """`[questions, labels]`: a softmax over the labels, or independent scores where a question asks for them."""
    scores = softmax(logits)
    independent = [row for row, question in enumerate(asked) if question.multi_label]
    if independent:
        assert calibration is not None  # noqa: S101  the ingress has the same model, and refused the request
        scores[independent] = independent_scores(logits[independent], calibration)
    return scores


def _chunks(tokens: TokenBatch, max_tokens: int) -> list[TokenBatch]:
    """Runs of sequences of at most `max_tokens` tokens each, or of one sequence that is longer."""
    chunks, start, held = [], 0, 0
    for i, length in enumerate(tokens.lengths):
        if i > start and held + length > max_tokens:
            chunks.append(tokens.select(np.arange(start, i)))
            start, held = i, 0
        held += int(length)
    return [*chunks, tokens.select(np.arange(start, len(tokens)))]
