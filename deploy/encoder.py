"""The encoder deployment: token ids in, rows out. A plain class; `app.py` puts it on Ray Serve."""

import asyncio
import functools
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deploy.batching import BatchInfo, MicroBatcher
from deploy.health import UnhealthyError, WatchedWorker
from deploy.metrics import (
    ENCODER_PASS_SECONDS,
    ENCODER_TOKENS,
    ENCODER_TOKENS_IN_HAND,
    ENCODER_TOKENS_QUEUED,
    ModelInfo,
)
from deploy.model import Models, ServedModel, served_models
from deploy.settings import Settings, ThreadSettings
from deploy.telemetry import NoSink, Reading, Sink
from deploy.tracing import NO_TRACER, Tracer
from deploy.trail import working_for
from deploy.wire import EncodeBatch, EncodedRows, EncoderIdentity, Priority, check_fingerprint
from deploy.workers import available_cores, give_way
from tokenalign.devices import to_host
from tokenalign.errors import TokenAlignError
from tokenalign.parallel import compute_alone, operator_threads, operator_threads_for, shards
from tokenalign.scoring import Aligner
from tokenalign.tokens import TokenBatch, compact

MAX_MERGED = 64  # batches in one pass
NICENESS = 7  # of computing threads; above the scorer's, since a batch that is nearly answered makes room soonest
REPORT_AGE_S = 5.0  # what a sender had waiting counts for so long in an encoder without work
# Multiply-adds of a pass of about a second on one core: it is shared out even where no other thread is idle yet, since
# the others would be long before it ends.
LONG_PASS = 5e10
CUDA_PASSES = 2  # in flight: the kernels of one run while the rows of the other are copied and checked


class Encoder:
    """Holds the frozen encoder, and projects for each of its heads; documents before labels.

    Batches of documents that arrive while it computes, from however many senders, share the next pass. On a CPU each
    thread computes sequences of its own, and a pass is shared out among those that are idle, a long one among all. On a
    CUDA GPU two threads each take a whole pass: their kernels share one stream, so they run in turn, but memory is
    needed for both, twice what `batching.max_batch_tokens` tokens take. Where that is too much, passes are halved.
    """

    def __init__(
        self,
        settings: Settings,
        model: ServedModel | Models | None = None,
        *,
        sink: Sink | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """sink, tracer: are told of passes; what is counted is in `readings`"""
        self._sink = sink or NoSink()
        self._tracer = tracer
        self._tokens: Counter[str] = Counter()
        self._model_info = ModelInfo()
        served_by_name = served_models(settings.model, model)
        models = list(served_by_name.values())
        self._backbone = models[0].load_backbone()
        self._threads = computing_threads(self._backbone.device, settings.threads)
        self._shares_passes = self._backbone.device.type == "cpu"
        self._projects = settings.model.project_on_encoder
        self._max_batch_tokens = settings.batching.max_batch_tokens
        self._aligners = {
            served.fingerprint(self._backbone.identity): Aligner(
                served.head.to(self._backbone.device), served.config.temperature
            )
            for served in models
        }
        self._names = list(served_by_name)
        fingerprint, *others = self._aligners
        self._identity = EncoderIdentity(self._backbone.identity, fingerprint, tuple(others))
        self._worker = WatchedWorker("encoder", self._threads, _prepare, max_pass_s=settings.health.max_pass_s)
        self._merger: MicroBatcher[EncodeBatch, NDArray[Any]] = MicroBatcher(
            self._encode_together,
            weight=lambda batch: len(batch.ids),
            identity=id,
            max_batch_tokens=self._max_batch_tokens,
            max_batch_items=MAX_MERGED,
            max_queue_items=sys.maxsize,  # the senders bound what they send
            max_queue_tokens=sys.maxsize,
            slots=lambda: self._threads,
            max_padding_share=1.0,
        )
        self._queued_elsewhere = 0
        self._told_at = 0.0
        self._in_hand_tokens = 0

    async def describe(self) -> EncoderIdentity:
        """What this replica serves."""
        return self._identity

    async def encode(self, batch: EncodeBatch) -> EncodedRows:
        """The rows of a batch, in its order.

        Raises `FingerprintMismatchError` for ids of another model's tokenizer, `NumericalError` for NaN or infinity.
        """
        if batch.fingerprint not in self._aligners:
            check_fingerprint("the batch of token ids", self._identity.fingerprint, batch.fingerprint)
        if batch.priority is Priority.DOCUMENTS:
            self._queued_elsewhere, self._told_at = batch.queued_tokens, time.monotonic()
        self._in_hand_tokens += len(batch.ids)
        size = {"sequences": len(batch.lengths), "tokens": len(batch.ids)}
        try:
            with self._tracer.work("encode", [batch.trail], **size) as span, working_for(span.trail):
                if batch.priority is Priority.DOCUMENTS:
                    [rows] = await self._merger.submit([replace(batch, trail=span.trail)], deadline_s=None)
                else:
                    rows = await self._compute(batch.tokens(), batch.priority, self._aligners[batch.fingerprint])
        finally:
            self._in_hand_tokens -= len(batch.ids)
        return EncodedRows(batch.fingerprint, rows, batch.lengths, self._projects)

    async def _encode_together(
        self, batches: Sequence[EncodeBatch], _: BatchInfo
    ) -> Sequence[NDArray[Any] | TokenAlignError]:
        """The rows of each batch, those for one head out of one pass."""
        by_head: dict[str, list[int]] = {}
        for i, batch in enumerate(batches):
            by_head.setdefault(batch.fingerprint, []).append(i)
        parts = await asyncio.gather(*(self._encode_for_head([batches[i] for i in own]) for own in by_head.values()))
        rows: dict[int, NDArray[Any] | TokenAlignError] = {}
        for own, part in zip(by_head.values(), parts, strict=True):
            rows |= zip(own, part, strict=True)
        return [rows[i] for i in range(len(batches))]

    async def _encode_for_head(self, batches: Sequence[EncodeBatch]) -> Sequence[NDArray[Any] | TokenAlignError]:
        """The rows of each batch out of one pass; where that fails, out of one each, so that none fails another."""
        aligner = self._aligners[batches[0].fingerprint]
        tokens = TokenBatch.concat([batch.tokens() for batch in batches])
        trails = [batch.trail for batch in batches]
        try:
            with self._tracer.work("pass", trails, tokens=len(tokens.values)) as span, working_for(span.trail):
                rows = await self._compute(tokens, Priority.DOCUMENTS, aligner)
        except TokenAlignError as error:
            if len(batches) == 1:
                return [error]
            alone = [await self._encode_for_head([batch]) for batch in batches]
            return [rows for [rows] in alone]
        return np.split(rows, np.cumsum([len(batch.ids) for batch in batches])[:-1])

    async def close(self) -> None:
        """Fails the documents that wait, and ends the computing thread after the work that it has."""
        await self._merger.close()
        self._worker.stop()

    def readings(self) -> Iterator[Reading]:
        """The metrics of what was encoded and of what is in hand, and the models served."""
        for kind, tokens in self._tokens.items():
            yield Reading(ENCODER_TOKENS, tokens, (kind,))
        stats = self.record_autoscaling_stats()
        yield Reading(ENCODER_TOKENS_IN_HAND, stats["tokens_in_hand"])
        yield Reading(ENCODER_TOKENS_QUEUED, stats["tokens_queued"])
        yield from self._model_info.readings(dict(zip(self._names, self._aligners, strict=False)))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Tokens in this replica's hands, and tokens that the latest sender had waiting behind its batch.

        Who has had nothing to do for a while knows of none: what waited has gone to others, or with its sender.
        """
        known = self._in_hand_tokens > 0 or time.monotonic() - self._told_at < REPORT_AGE_S
        queued = self._queued_elsewhere if known else 0
        return {"tokens_in_hand": float(self._in_hand_tokens), "tokens_queued": float(queued)}

    async def check_health(self) -> None:
        """Raises `UnhealthyError` when this replica gets nowhere any more. Asks nobody, so not the label store."""
        if self._merger.closed:
            raise UnhealthyError("the encoder takes no more batches; this replica is to be replaced")
        self._worker.check()

    async def _compute(self, tokens: TokenBatch, priority: Priority, aligner: Aligner) -> NDArray[Any]:
        """`[tokens, width]` rows, computed by the idle threads together or by all, else by the next that is idle."""
        multiply_adds = float(len(tokens.values) * self._backbone.token_multiply_adds)
        idle = max(1, self._worker.idle) if self._shares_passes else 1
        parts = self._threads if self._shares_passes and multiply_adds >= LONG_PASS else idle
        shares = [tokens.select(share) for share in shards(tokens.lengths, parts)] if parts > 1 else [tokens]
        threads = operator_threads_for(multiply_adds, idle) if len(shares) == 1 else 1
        runs = [
            self._worker.run(functools.partial(self._rows, share, priority, aligner, threads), int(priority))
            for share in shares
        ]
        started = time.perf_counter()
        rows = np.concatenate(await asyncio.gather(*runs))
        kind = priority.name.lower()
        self._sink.observe(ENCODER_PASS_SECONDS, time.perf_counter() - started, {"kind": kind})
        self._tokens[kind] += len(tokens.values)
        return rows

    def _rows(self, tokens: TokenBatch, priority: Priority, aligner: Aligner, threads: int) -> NDArray[Any]:
        what = f"{priority.name.lower()} encoded"
        with operator_threads(threads):
            states = self._backbone.encode(tokens, max_batch_tokens=self._max_batch_tokens)
            if self._projects:
                return aligner.project(states, what)
            return compact(to_host(states.float()), what)


def _prepare() -> None:
    give_way(NICENESS)
    compute_alone()


def computing_threads(device: torch.device, threads: ThreadSettings) -> int:
    """How many passes an encoder on `device` computes at a time, each on a thread of its own."""
    if device.type == "cpu":
        return threads.encoder or available_cores()
    return CUDA_PASSES if device.type == "cuda" else 1
