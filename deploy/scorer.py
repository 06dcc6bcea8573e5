"""The scorer deployment: encoded rows and label sets in, scores out. A plain class; `app.py` puts it on Ray Serve."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deploy.label_cache.cache import LabelCache, Variant
from deploy.label_cache.codec import LabelRows
from deploy.label_cache.lru import ByteLru
from deploy.label_cache.metrics import LOOKUP_SECONDS, cache_readings, store_readings
from deploy.label_cache.stats import CacheStats
from deploy.label_cache.store import Store
from deploy.label_lint import near_duplicates
from deploy.label_sets import LABEL_BYTES
from deploy.model import ServedModel
from deploy.settings import Settings
from deploy.telemetry import NoSink, Reading, Sink
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
from deploy.workers import PriorityWorker, available_cores
from tokenalign.errors import FingerprintMismatchError, InputError, TokenAlignError
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
class _Model:
    """What this replica holds for the encoder that it works with."""

    identity: EncoderIdentity
    cache: LabelCache

    @property
    def fingerprint(self) -> str:
        return self.identity.fingerprint


class Scorer:
    """Looks up label rows, and scores documents with them on a computing thread of its own.

    encode, describe: reach the encoder; store: where label rows are shared with other replicas, or None
    sink: is told how long each look-up took; what is counted is in `stats` and `readings`
    """

    def __init__(
        self,
        settings: Settings,
        encode: Encode,
        describe: Describe,
        store: Store | None,
        model: ServedModel | None = None,
        sink: Sink | None = None,
    ) -> None:
        self._settings = settings
        self._encode = encode
        self._describe = describe
        self._store = store
        self._sink = sink or NoSink()
        self._stats = CacheStats()
        self._served = model or ServedModel.load(settings.model)
        torch.set_num_threads(settings.threads.scorer or available_cores())
        self._aligner = Aligner(self._served.head, self._served.config.temperature)
        self._worker = PriorityWorker("scorer")
        self._label_sets: ByteLru[bytes, LabelSet] = ByteLru(REMEMBERED_LABEL_BYTES)
        self._known: OrderedDict[tuple[LabelSet, str | None, str | None], _Known] = OrderedDict()
        self._model: _Model | None = None
        self._meeting = asyncio.Lock()

    async def start(self) -> None:
        """Returns once the encoder is known and holds the same model."""
        await self._meet_encoder()

    async def close(self) -> None:
        """Finishes writes to the label store, closes it, and ends the computing thread."""
        if self._model is not None:
            await self._model.cache.close()
        self._worker.stop()

    async def describe(self) -> str:
        """The fingerprint of the model that this replica scores with."""
        return (await self._current()).fingerprint

    def stats(self) -> CacheStats:
        """What the label cache did since this replica started, whatever models it has served."""
        return self._stats

    def readings(self) -> Iterator[Reading]:
        """The metrics of the label cache and of its store."""
        yield from cache_readings(self._stats)
        yield from store_readings(self._store)

    async def score(self, batch: ScoreBatch) -> ScoredBatch:
        """An answer, or its own error, for each question of the batch, in order.

        The documents are encoded while their labels are looked up. Raises `FingerprintMismatchError` when the batch, or
        what the encoder gives for it, is of another model than this replica's, and `ReplicaLostError`.
        """
        model = await self._current()
        if batch.fingerprint != model.fingerprint:
            model = await self._meet_encoder()
        check_fingerprint("the batch of questions", model.fingerprint, batch.fingerprint)
        rows, sides = await asyncio.gather(
            self._rows(model, batch.documents),
            asyncio.gather(*(self._side(model, asked) for asked in batch.label_sets)),
        )
        answers = await self._worker.run(lambda: self._answer(model, rows, batch, sides))
        return ScoredBatch.of(model.fingerprint, answers)

    async def warm(self, fingerprint: str, labels: LabelSet, tenant: str | None = None) -> LabelReport:
        """What to tell of a label set, its near-duplicates included, once its rows are where every scorer finds them.

        Raises `InputError` at a label without a token, and `FingerprintMismatchError` for a caller of another model.
        """
        model = await self._current()
        if fingerprint != model.fingerprint:
            model = await self._meet_encoder()
        check_fingerprint("the label set", model.fingerprint, fingerprint)
        known = await self._know(labels, None, tenant)
        kept = await model.cache.keep(labels.descriptions, tenant)
        told = {int(w["loc"][1]) for w in known.warnings if w["type"] == "indistinguishable"}
        threshold = self._settings.label_sets.near_duplicate_similarity
        # Beside the computing thread, which answers requests.
        near = await asyncio.to_thread(near_duplicates, labels, kept.rows, threshold, told)
        return LabelReport(kept.hits, (*known.warnings, *near))

    async def _current(self) -> _Model:
        return self._model or await self._meet_encoder()

    async def _meet_encoder(self) -> _Model:
        """Ask the encoder what it serves; a new encoder gets a cache under its own fingerprint."""
        async with self._meeting:
            identity = await self._describe()
            fingerprint = self._served.fingerprint(identity.backbone)
            check_fingerprint("the encoder", fingerprint, identity.fingerprint)
            if self._model is None or self._model.fingerprint != fingerprint:
                self._model = _Model(identity, self._open_cache(identity))
            return self._model

    def _open_cache(self, identity: EncoderIdentity) -> LabelCache:
        options = self._settings.label_cache

        async def encode(descriptions: list[str]) -> LabelRows:
            # For this cache's model and no newer one, whose rows would be kept under the wrong name.
            return await self._encode_labels(identity.fingerprint, descriptions, None)

        return LabelCache(
            self._store,
            encode,
            width=self._served.config.width,
            fingerprint=self._served.label_fingerprint(identity.backbone),
            namespace=options.namespace,
            memory_bytes=options.memory_bytes,
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
        known = await self._know(labels, asked.template, asked.tenant)
        started = time.perf_counter()
        variant = None if asked.template is None else self._variant(model, asked.template)
        cached = await model.cache.get(labels.descriptions, asked.tenant, variant)
        self._sink.observe(LOOKUP_SECONDS, time.perf_counter() - started, {"source": cached.source})
        report = LabelReport(cached.hits, known.warnings)
        return _Side(labels, known, LabelQueries(cached.rows.values, cached.rows.lengths), report)

    async def _passing_side(self, model: _Model, asked: AskedLabels) -> _Side:
        """The label side of a set of which nothing may stay."""
        labels = asked.labels.unpack()
        known = await self._worker.run(lambda: self._read(labels, asked.template))
        rows = await self._encode_labels(model.fingerprint, list(labels.descriptions), asked.template)
        return _Side(labels, known, LabelQueries(rows.values, rows.lengths), LabelReport(0, known.warnings))

    def _variant(self, model: _Model, template: str) -> Variant:
        """Rows of descriptions in another template: what a head with that template of its own would make and keep."""
        served, fingerprint = self._served, model.fingerprint

        async def encode(descriptions: list[str]) -> LabelRows:
            return await self._encode_labels(fingerprint, descriptions, template)

        config = served.config.model_copy(update={"label_template": template})
        return Variant(
            label_fingerprint(config, model.identity.backbone, served.tokenizer.digest, served.head_digest), encode
        )

    def _unpack(self, packed: PackedLabels) -> LabelSet:
        labels = self._label_sets.get(packed.key)
        if labels is None:
            labels = packed.unpack()
            self._label_sets.put(packed.key, labels, len(packed.data) + LABEL_BYTES * len(labels.descriptions))
        return labels

    async def _know(self, labels: LabelSet, template: str | None, tenant: str | None) -> _Known:
        """The tokens and warnings of a label set; `InputError` at the label that has no token.

        Remembered for each tenant by itself: a quick answer would tell one what another has asked.
        """
        key = (labels, template, tenant)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        known = await self._worker.run(lambda: self._read(labels, template))
        self._known[key] = known
        while len(self._known) > REMEMBERED_SETS:
            self._known.popitem(last=False)
        return known

    def _read(self, labels: LabelSet, template: str | None) -> _Known:
        try:
            tokenized = self._served.tokenizer.labels(labels.descriptions, template=template)
        except InputError as error:
            if error.loc[:1] != ("labels",):
                raise
            raise InputError(error.message, labels.location(int(error.loc[-1]))) from error
        return _Known(tokenized, tuple(label_warnings(labels, tokenized)))

    async def _encode_labels(self, fingerprint: str, descriptions: list[str], template: str | None) -> LabelRows:
        """Fresh label rows: tokenised here, encoded there in chunks behind documents, contextualised here."""
        tokens = (await self._worker.run(lambda: self._served.tokenizer.labels(descriptions, template=template))).tokens
        chunks, encoded = _chunks(tokens, self._settings.batching.max_batch_tokens), []
        for chunk in chunks:
            rows = await self._encode(EncodeBatch.of(fingerprint, chunk, Priority.LABELS))
            check_fingerprint("the encoded labels", fingerprint, rows.fingerprint)
            encoded.append(rows)

        def contextualise() -> LabelQueries:
            parts = [chunk.with_values(self._projected(rows)) for chunk, rows in zip(chunks, encoded, strict=True)]
            return self._aligner.label_queries(TokenBatch.concat(parts))

        queries = await self._worker.run(contextualise)
        return LabelRows(queries.values, queries.lengths)

    def _projected(self, rows: EncodedRows) -> NDArray[Any]:
        """`[tokens, width]` rows behind the head's projection, wherever that runs."""
        if rows.projected:
            return rows.values
        return self._aligner.project(torch.from_numpy(rows.values.astype(np.float32)), "rows")

    def _answer(
        self, model: _Model, rows: EncodedRows, batch: ScoreBatch, sides: Sequence[_Side | TokenAlignError]
    ) -> list[Answer | TokenAlignError]:
        tokens = TokenBatch(self._projected(rows), rows.lengths, batch.keep)
        keys = self._aligner.document_keys(tokens).merged(batch.counts)
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
        logits = self._aligner.logits(side.labels, side.queries, keys.select([q.document for q in asked]))
        scores = self._scores(logits, asked)
        orders = ranking(logits, None).astype(np.int32)
        answers: list[Answer] = []
        for row, question in enumerate(asked):
            order = orders[row, : question.top_k]
            document = keys.slice(question.document) if question.explain else None
            alignments = tuple(
                self._aligner.align(side.labels, label, side.known.tokenized, side.queries, document)
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

    def _scores(self, logits: FloatArray, asked: Sequence[Question]) -> FloatArray:
        """`[questions, labels]`: a softmax over the labels, or independent scores where a question asks for them."""
        scores = softmax(logits)
        independent = [row for row, question in enumerate(asked) if question.multi_label]
        if independent:
            calibration = self._served.config.multi_label
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
