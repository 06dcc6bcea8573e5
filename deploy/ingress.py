"""The ingress deployment: tokenises and batches texts, and writes answers. A plain class; `app.py` puts it on Serve."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deploy.attempts import Attempts
from deploy.batching import BatchInfo, DeadlineExceeded, MicroBatcher
from deploy.health import UnhealthyError
from deploy.http.errors import NotReadyError, UnknownModelError
from deploy.http.schemas import (
    ClassifyQuery,
    label_set_json,
    placed_labels,
    response_json,
    result_json,
    summary_json,
)
from deploy.ingress_stats import IngressStats, label_set_readings
from deploy.label_cache.lru import ByteLru
from deploy.label_cache.metrics import store_readings
from deploy.label_cache.store import Store
from deploy.label_sets import LABEL_BYTES, Definition, LabelSets, LabelSetsUnavailableError
from deploy.metrics import (
    BATCH_FILL,
    BATCH_SECONDS,
    BATCH_SLOTS,
    BATCH_TEXTS,
    BATCH_TOKENS,
    BATCHES_IN_FLIGHT,
    QUEUE_WAIT_SECONDS,
    QUEUED_TEXTS,
    QUEUED_TOKENS,
    ModelInfo,
)
from deploy.model import Models, ServedModel, served_models
from deploy.request_context import RequestContext, current_request, lap
from deploy.settings import Settings
from deploy.streaming import as_they_come
from deploy.telemetry import NoSink, Reading, Sink
from deploy.tracing import NO_TRACER, Tracer
from deploy.trail import Trail, working_for
from deploy.wire import (
    Answer,
    AskedLabels,
    EncodeBatch,
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
from tokenalign.errors import (
    ConfigError,
    DeviceMemoryError,
    FingerprintMismatchError,
    InputError,
    NumericalError,
    TokenAlignError,
)
from tokenalign.label_files import LabelFile
from tokenalign.labels import LabelSet
from tokenalign.long_text import LongText
from tokenalign.results import check_multi_label
from tokenalign.text import Windowed
from tokenalign.tokens import TokenBatch

Send = Callable[[ScoreBatch], Awaitable[ScoredBatch]]
Describe = Callable[[], Awaitable[EncoderIdentity]]
Warm = Callable[[str, LabelSet, str | None], Awaitable[LabelReport]]

logger = logging.getLogger(__name__)

OFF_LOOP_CHARS = 20_000  # texts of more characters together are tokenised on a thread; below, the hop costs more
MIN_SHARE_TEXTS = 16  # a batch of fewer costs more on its way than a second one in flight gives
LINGER_S = 0.01  # a fraction of what a batch in flight takes
PROBE_AGE_S = 1.0  # readiness is asked of the encoder at most so often
PROBE_TIMEOUT_S = 5.0
WARM_UP_TEXT = "A first text, so that no caller waits for what is set up at the first use."
WARM_UP_LABELS = ("greeting", "warm-up")


@dataclass(frozen=True, slots=True)
class _Candidates:
    """A label set and how it is asked for; what is equal is one label set of a batch."""

    labels: LabelSet
    template: str | None
    tenant: str | None
    keep: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """One text of one request, ready to be sent.

    tokens: of the text, or of each of its windows
    question: to be asked of it; its positions in the batch are not known yet
    head: the name of the one that is asked
    number: of the text in its request where each text has labels of its own, else None
    request: that it belongs to, None at the start of the application
    """

    text: str
    stride: int | None
    tokens: TokenBatch
    candidates: _Candidates
    question: Question
    head: str
    number: int | None
    request: RequestContext | None

    @property
    def identity(self) -> tuple[str, str, int, int | None]:
        """Equal for items with equal tokens for one head: a text of one window is the same however it is read."""
        windows = len(self.tokens)
        return self.head, self.text, windows, self.stride if windows > 1 else None


class Ingress:
    """Answers requests by way of an encoder and a scorer.

    send: passes a batch to a scorer, which has it encoded; describe: asks an encoder what it serves
    warm: has a scorer bring the rows of a label set to where all find them, for a model's fingerprint and a tenant
    slots: how many batches this ingress may have in flight now
    store: where label sets are kept, or None
    sink, tracer: who is told of batches; the rest is in `readings`
    """

    def __init__(
        self,
        settings: Settings,
        send: Send,
        describe: Describe,
        warm: Warm,
        slots: Callable[[], int],
        store: Store | None,
        model: ServedModel | Models | None = None,
        *,
        sink: Sink | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._settings = settings
        self._sink = sink or NoSink()
        self._tracer = tracer
        self._stats = IngressStats()
        self._model_info = ModelInfo()
        self._store = store
        self._send = send
        self._describe = describe
        self._warm = warm
        self._listed = [_read_list(listed.file, listed.name, settings) for listed in settings.label_sets.warm]
        self._label_sets = LabelSets(
            store,
            namespace=settings.label_cache.namespace,
            memory_bytes=settings.label_sets.memory_bytes,
            memory_ttl_s=settings.label_sets.memory_ttl_s,
            max_bytes=settings.label_sets.max_bytes,
            store_budget_s=settings.label_cache.store_budget_s,
        )
        self._models = served_models(settings.model, model)
        self._name, self._model = next(iter(self._models.items()))
        self._fingerprints: dict[str, str] = {}
        self._packed: ByteLru[LabelSet, PackedLabels] = ByteLru(settings.label_sets.memory_bytes)
        self._identity: EncoderIdentity | None = None
        self._started = False
        self._probed_at = float("-inf")
        self._open_requests = 0
        self._slots = slots
        batching = settings.batching
        self._attempts = Attempts(batching.request_timeout_s)
        self._batcher: MicroBatcher[_Item, Answer] = MicroBatcher(
            self._dispatch,
            weight=lambda item: len(item.tokens.values),
            identity=lambda item: item.identity,
            max_batch_tokens=batching.max_batch_tokens,
            max_batch_items=batching.max_batch_texts,
            max_queue_items=batching.max_queue_texts,
            max_queue_tokens=batching.max_queue_tokens,
            min_share_items=MIN_SHARE_TEXTS,
            linger_s=LINGER_S,
            max_padding_share=1.0,  # the encoder puts sequences of like length together by itself
            slots=self._slots_now,
        )

    async def start(self) -> None:
        """Returns once a first request went all the way, and the label sets of the settings are known and encoded.

        Raises `ConfigError` naming file and line of a label that can't be scored.
        """
        await self._meet_encoder()
        first = ClassifyQuery((WARM_UP_TEXT,), True, LabelSet.of(WARM_UP_LABELS), True, False, None)
        for name in self._models:
            await self.classify(replace(first, model=name))
        for file, definition in self._listed:
            await self._register(file, definition)
        self._started = True

    async def close(self) -> None:
        """Ends batching; requests that wait get an error. Closes the store of label sets."""
        await self._batcher.close()
        await self._label_sets.close()

    async def ready(self) -> None:
        """Returns when requests can be answered; else raises `NotReadyError`. The label store has no say in it."""
        if not self._started:
            raise NotReadyError("the service is starting; ask again in a moment")
        now = time.monotonic()
        if now - self._probed_at < PROBE_AGE_S:
            return
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._describe()
        except (TimeoutError, TokenAlignError) as error:
            raise NotReadyError("no encoder answers; the service is starting or lost its replicas") from error
        self._probed_at = now

    async def check_health(self) -> None:
        """Raises `UnhealthyError` when this replica serves no more requests. Asks nobody, so not the label store."""
        if self._batcher.closed:
            raise UnhealthyError("the ingress forms no more batches; this replica is to be replaced")

    def readings(self) -> Iterator[Reading]:
        """The metrics of requests' texts, of the queue, of label sets and of their store, and the models served."""
        yield from self._stats.readings()
        yield Reading(QUEUED_TEXTS, self._batcher.queued_items)
        yield Reading(QUEUED_TOKENS, self._batcher.queued_tokens)
        yield Reading(BATCHES_IN_FLIGHT, self._batcher.in_flight)
        yield Reading(BATCH_SLOTS, self._slots())
        yield from label_set_readings(self._label_sets.stats)
        yield from store_readings(self._store)
        yield from self._model_info.readings(self._fingerprints)

    def model_info(self) -> dict[str, Any]:
        """What is served: name, fingerprint, encoder, limits."""
        identity, config = self._known_identity(), self._model.config
        return {
            "name": config.name,
            "fingerprint": identity.fingerprint,
            "backbone": {
                "reference": identity.backbone.reference,
                "revision": identity.backbone.revision,
                "sha256": identity.backbone.weights_sha256,
                "dtype": identity.backbone.dtype,
            },
            "max_length": config.max_length,
            "document_template": config.document_template,
            "label_template": config.label_template,
            "logit_scale": self._model.logit_scale,
            "limits": self._settings.limits.model_dump(),
        }

    def models_info(self) -> dict[str, Any]:
        """The heads that are served, by name; the default one first."""
        self._known_identity()
        models = [
            {"name": name, "fingerprint": fingerprint, "default": name == self._name}
            for name, fingerprint in self._fingerprints.items()
        ]
        return {"models": models}

    def check_room(self, texts: int = 1) -> None:
        """Raises `QueueFull` where a request of so many texts is to be refused, whatever they are."""
        self._batcher.check_room(texts)
        batching = self._settings.batching
        if self._open_requests >= batching.min_open_requests:
            self._batcher.check_wait(batching.max_queue_wait_s)

    @contextlib.contextmanager
    def _admitted(self, texts: int) -> Iterator[None]:
        """While a request is answered; the errors of `check_room` come first."""
        self.check_room(texts)
        self._open_requests += 1
        try:
            yield
        finally:
            self._open_requests -= 1

    async def classify(self, query: ClassifyQuery) -> dict[str, Any]:
        """The JSON answer to a good request.

        Raises `InputError` for a text or label without tokens, `UnknownModelError`, the batcher's errors (queue full,
        deadline passed), and `FingerprintMismatchError` when a rollout came between its texts.
        """
        self._known_identity()
        with self._admitted(len(query.texts)):  # before the work of reading them: under overload most are refused
            windowed = await self._tokenize(query)
            items = self._items(query, windowed)
            lap("tokenise")
            answers = await self._batcher.submit(items, deadline_s=self._settings.batching.request_timeout_s)
        lap("wait")
        for answer in answers:
            check_fingerprint("one of the texts' scores", answers[0].fingerprint, answer.fingerprint)
        model = {"name": query.model or self._name, "fingerprint": answers[0].fingerprint}
        return response_json(query, windowed, answers, model)

    def logit_scale(self, model: str) -> float:
        """What a mean of cosines is multiplied with to be a logit of the head with that name."""
        return self._models[model].logit_scale

    def predict_label_set(self) -> str | None:
        """The id of the label set that the settings name for `/predict`, None where they name none."""
        named = self._settings.dialects.predict_label_set
        listed = {definition.name: definition.set_id for _, definition in self._listed}
        return listed.get(named, named)

    async def classify_stream(self, query: ClassifyQuery) -> AsyncGenerator[dict[str, Any], None]:
        """`{"index": …, …}`, the result of each text as soon as it is there, and at last what all share.

        Raises as `classify` does; the time limit is that of each text, from when it begins to wait. Only a few batches
        of texts are under way at a time, and none after the generator is closed.
        """
        self._known_identity()
        with self._admitted(1):
            windowed = await self._tokenize(query)
            items = self._items(query, windowed)
            lap("tokenise")
            reports: dict[int, LabelReport] = {}
            fingerprint: str | None = None
            async with contextlib.aclosing(as_they_come(items, self._submit, self._ahead)) as answers:
                async for i, answer in answers:
                    fingerprint = fingerprint or answer.fingerprint
                    check_fingerprint("one of the texts' scores", fingerprint, answer.fingerprint)
                    reports[i] = answer.report
                    yield {"index": i, **result_json(query, i, windowed[i], answer)}
        model = {"name": query.model or self._name, "fingerprint": fingerprint}
        yield summary_json(query, windowed, [reports[i] for i in range(len(items))], model)

    async def label_set(self, set_id: str, *, tenant: str | None = None) -> Definition:
        """The label set with that id, of that tenant; raises what `LabelSets.get` raises."""
        return await self._label_sets.get(set_id, tenant=tenant)

    async def add_label_set(
        self, labels: LabelSet, name: str | None, *, tenant: str | None = None
    ) -> tuple[dict[str, Any], bool]:
        """The JSON answer once the set is known to every replica and its labels are encoded, and whether it is new.

        Raises `InputError`, `LabelSetsUnavailableError`, `DeadlineExceeded`, and what a request without an id may.
        """
        self._known_identity()
        definition = Definition.of(labels, name)
        known = await self._label_sets.known(definition, tenant=tenant)
        limit_s = self._settings.batching.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                report = await self._report(labels, tenant)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{len(labels.descriptions):,} descriptions were not encoded within {limit_s:g} s "
                "(batching.request_timeout_s); send the set again, what was encoded by then is kept"
            ) from error
        if known is None:
            await self._label_sets.keep(definition, tenant=tenant)
        return label_set_json(known or definition, report), known is None

    async def delete_label_set(self, set_id: str, *, tenant: str | None = None) -> None:
        """Returns once the store has no such set; raises what `LabelSets.delete` raises."""
        await self._label_sets.delete(set_id, tenant=tenant)

    async def _report(self, labels: LabelSet, tenant: str | None) -> LabelReport:
        """What to tell of a set whose labels are encoded by now. A lost or changing replica is tried once more."""
        try:
            return await self._warm_heads(labels, tenant)
        except FingerprintMismatchError:
            await self._meet_encoder()
        except ReplicaLostError:
            pass
        return await self._warm_heads(labels, tenant)

    async def _warm_heads(self, labels: LabelSet, tenant: str | None) -> LabelReport:
        """The default head's report, once every head has the labels encoded."""
        self._known_identity()
        own, *_ = await asyncio.gather(*(self._warm(f, labels, tenant) for f in self._fingerprints.values()))
        return own

    async def _register(self, file: LabelFile, definition: Definition) -> None:
        """Has a set of the settings encoded, and known to this replica for good, also while the store is down."""
        try:
            report = await self._report(definition.labels, None)
            if await self._label_sets.known(definition) is None:
                await self._label_sets.keep(definition)
        except InputError as error:
            raise ConfigError(f"label_sets.warm: {file.place(error.loc)}: {error.message}") from error
        except LabelSetsUnavailableError as error:
            logger.warning("label_sets.warm: %s is known to its own replicas alone: %s", file.path, error)
        else:
            for warning in report.warnings:
                logger.warning("label_sets.warm: %s: %s", file.place(tuple(warning["loc"])), warning["message"])
        self._label_sets.pin(definition)

    def _slots_now(self) -> int:
        """What this ingress may have in flight; a batch that seems lost has another one beside it."""
        slots = self._slots()
        return slots + min(slots, self._attempts.overdue)

    def _head(self, query: ClassifyQuery) -> ServedModel:
        if query.model is None:
            return self._model
        if query.model not in self._models:
            raise UnknownModelError(query.model, list(self._models))
        return self._models[query.model]

    async def _submit(self, item: _Item) -> Answer:
        [answer] = await self._batcher.submit([item], deadline_s=self._settings.batching.request_timeout_s)
        return answer

    def _ahead(self) -> int:
        """How many texts of a stream may be under way: what keeps the slots busy, and leaves the queue to others."""
        return self._settings.batching.max_batch_texts * max(1, self._slots())

    def _items(self, query: ClassifyQuery, windowed: Sequence[Windowed]) -> list[_Item]:
        head, name = self._head(query), query.model or self._name
        template, question = _template(query, head), _question(query, head)
        shared = _Candidates(query.labels, template, query.tenant, query.keep_labels)
        request = current_request()
        items = []
        for i, (text, windows) in enumerate(zip(query.texts, windowed, strict=True)):
            candidates, number = shared, None
            if query.text_labels:
                candidates, number = replace(shared, labels=query.labels_of(i)), i
            tokens = windows.tokenized.tokens
            items.append(_Item(text, query.window_stride, tokens, candidates, question, name, number, request))
        self._stats.count(windowed)
        return items

    async def _tokenize(self, query: ClassifyQuery) -> list[Windowed]:
        tokenizer = self._head(query).tokenizer
        reading = LongText.of(
            query.long_text,
            query.window_stride,
            self._settings.limits.max_windows,
            window_tokens=tokenizer.window_tokens,
        )

        def work() -> list[Windowed]:
            try:
                windowed = reading.read(tokenizer, query.texts)
            except InputError as error:
                raise (InputError(error.message, ("text",)) if query.single else error) from error
            if len(windowed.tokenized.tokens) == len(windowed):
                return [Windowed.whole(text) for text in windowed.tokenized.each()]
            return list(windowed.parts(1))

        if sum(map(len, query.texts)) > OFF_LOOP_CHARS:
            return await asyncio.to_thread(work)
        return work()

    async def _dispatch(self, items: Sequence[_Item], info: BatchInfo) -> Sequence[Answer | BaseException]:
        """An answer for each item, or its error; each head's items are sent by themselves, and encoded together."""
        self._tell(items, info)
        by_head: dict[str, list[int]] = {}
        for i, item in enumerate(items):
            by_head.setdefault(item.head, []).append(i)
        parts = await asyncio.gather(
            *(self._dispatch_apart(name, [items[i] for i in of_head], info) for name, of_head in by_head.items()),
            return_exceptions=True,
        )
        answers: dict[int, Answer | BaseException] = {}
        for of_head, part in zip(by_head.values(), parts, strict=True):
            answers |= zip(of_head, [part] * len(of_head) if isinstance(part, BaseException) else part, strict=True)
        return [answers[i] for i in range(len(items))]

    def _tell(self, items: Sequence[_Item], info: BatchInfo) -> None:
        """Tells of a batch that leaves; the cost is one batch's, not each request's."""
        self._sink.observe(QUEUE_WAIT_SECONDS, info.waited_s, {})
        self._sink.observe(BATCH_TEXTS, len(items), {})
        self._sink.observe(BATCH_TOKENS, info.tokens, {})
        self._sink.observe(BATCH_FILL, info.tokens / self._settings.batching.max_batch_tokens, {})

    async def _dispatch_apart(
        self, name: str, items: Sequence[_Item], info: BatchInfo
    ) -> Sequence[Answer | BaseException]:
        """As above, of one head; where a text can't be encoded, halves of the batch are tried until it fails alone."""
        try:
            return await self._dispatch_head(name, items, info)
        except (NumericalError, DeviceMemoryError) as error:
            if len(items) == 1:
                return [error]
            half = len(items) // 2
            parts = [await self._dispatch_apart(name, part, info) for part in (items[:half], items[half:])]
            return [answer for part in parts for answer in part]

    async def _dispatch_head(
        self, name: str, items: Sequence[_Item], info: BatchInfo
    ) -> Sequence[Answer | BaseException]:
        """As above, of one head. Idempotent work: a lost or changing replica is tried once more."""
        try:
            return await self._attempts.first(self._dispatch_once(name, items, info))
        except FingerprintMismatchError:
            self._stats.retries["other_model"] += 1
            await self._meet_encoder()
        except ReplicaLostError:
            self._stats.retries["replica_lost"] += 1
        return await self._attempts.second(self._dispatch_once(name, items, info))

    async def _dispatch_once(
        self, name: str, items: Sequence[_Item], info: BatchInfo
    ) -> Sequence[Answer | BaseException]:
        self._known_identity()
        fingerprint = self._fingerprints[name]
        rows: dict[tuple[str, str, int, int | None], int] = {}
        documents: list[TokenBatch] = []
        for item in items:
            if rows.setdefault(item.identity, len(rows)) == len(documents):
                documents.append(item.tokens)
        tokens = TokenBatch.concat(documents)
        owned: dict[_Candidates, int] = {}
        questions = tuple(
            replace(
                item.question,
                document=rows[item.identity],
                labels=owned.setdefault(item.candidates, len(owned)),
            )
            for item in items
        )
        with self._watched(items, info) as trail:
            scored = await self._send(
                ScoreBatch(
                    EncodeBatch.of(fingerprint, tokens, Priority.DOCUMENTS, info.queued_tokens, trail),
                    tokens.keep,
                    np.array([len(document) for document in documents], dtype=np.int32),
                    tuple(self._asked(candidates) for candidates in owned),
                    questions,
                )
            )
        check_fingerprint("the scores", fingerprint, scored.fingerprint)
        return [_placed(answer, item) for answer, item in zip(scored.answers(), items, strict=True)]

    @contextlib.contextmanager
    def _watched(self, items: Sequence[_Item], info: BatchInfo) -> Iterator[Trail]:
        """The trail that a batch carries; its time is told once it is back."""
        requests = list(dict.fromkeys(item.request for item in items if item.request is not None))
        trails = [request.trail for request in requests]
        started = time.perf_counter()
        with self._tracer.work("batch", trails, texts=len(items), tokens=info.tokens) as span, working_for(span.trail):
            if len(requests) > 1:
                for request in requests:
                    request.span.link(span.trail)
            yield span.trail
        self._sink.observe(BATCH_SECONDS, time.perf_counter() - started, {})

    def _asked(self, candidates: _Candidates) -> AskedLabels:
        labels, keep = candidates.labels, candidates.keep
        packed = self._pack(labels) if keep else PackedLabels.of(labels)
        return AskedLabels(packed, candidates.template, candidates.tenant, keep)

    def _pack(self, labels: LabelSet) -> PackedLabels:
        packed = self._packed.get(labels)
        if packed is None:
            packed = PackedLabels.of(labels)
            self._packed.put(labels, packed, len(packed.data) + LABEL_BYTES * len(labels.descriptions))
        return packed

    def _known_identity(self) -> EncoderIdentity:
        if self._identity is None:
            raise NotReadyError("the service is starting; ask again in a moment")
        return self._identity

    async def _meet_encoder(self) -> None:
        identity = await self._describe()
        fingerprints = {name: model.fingerprint(identity.backbone) for name, model in self._models.items()}
        for fingerprint in fingerprints.values():
            identity.check_serves(fingerprint)
        self._identity, self._fingerprints = identity, fingerprints


def _template(query: ClassifyQuery, head: ServedModel) -> str | None:
    """The caller's own template, None where it is the head's: both then are the same labels, kept once."""
    template = query.label_template
    if template is None or template == head.config.label_template:
        return None
    head.tokenizer.check_label_template(template)
    return template


def _question(query: ClassifyQuery, head: ServedModel) -> Question:
    check_multi_label(query.multi_label, head.config)
    in_windows = query.long_text == "window"  # the best label's matches say which window is the best
    thresholds = query.thresholds.resolved(head.config, multi_label=query.multi_label)
    return Question(0, 0, query.explain or in_windows, query.top_k, query.multi_label, thresholds)


def _placed(answer: Answer | TokenAlignError, item: _Item) -> Answer | TokenAlignError:
    """The answer; an error about labels of this text alone says which text's they are."""
    if item.number is None or not isinstance(answer, InputError) or answer.loc[:1] != ("labels",):
        return answer
    return InputError(answer.message, placed_labels(answer.loc, item.number))


def _read_list(path: Path, name: str | None, settings: Settings) -> tuple[LabelFile, Definition]:
    """A file of the settings as a label set; `ConfigError` names file and line."""
    file = LabelFile.read(path)
    try:
        labels = LabelSet.of(
            file.labels,
            min_labels=1,
            max_labels=settings.limits.max_labels,
            max_chars=settings.limits.max_text_chars,
        )
    except InputError as error:
        raise ConfigError(f"label_sets.warm: {file.place(error.loc)}: {error.message}") from error
    return file, Definition.of(labels, name)
