"""The encoder: the library's rows, documents first, never on the event loop."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from deploy.encoder import Encoder, computing_threads
from deploy.settings import Settings, ThreadSettings
from deploy.wire import EncodeBatch, Priority
from deploy.workers import available_cores
from tokenalign.errors import FingerprintMismatchError, InputError, NumericalError
from tokenalign.head import AlignmentHead
from tokenalign.scoring import Aligner
from tokenalign.tokens import TokenBatch

TEXTS = ["card payment declined", "cash", "the card was charged twice, not received"]


def settings_of(**model: Any) -> Settings:
    """One computing thread, so that the order of passes is known."""
    return Settings.parse({"model": {"device": "cpu", **model}, "threads": {"encoder": 1}})


@pytest.fixture
async def make_encoder() -> Any:
    """Makes encoders, and ends their threads."""
    made: list[Encoder] = []

    def make(model: Any, settings: Settings | None = None) -> Encoder:
        made.append(Encoder(settings or settings_of(), model))
        return made[-1]

    yield make
    for encoder in made:
        await encoder.close()


def documents(model: Any, texts: list[str]) -> TokenBatch:
    tokens: TokenBatch = model.tokenizer.documents(texts).tokens
    return tokens


def batch_of(model: Any, texts: list[str], priority: Priority = Priority.DOCUMENTS, queued: int = 0) -> EncodeBatch:
    return EncodeBatch.of(model.fingerprint(model.backbone.identity), documents(model, texts), priority, queued)


async def test_rows_are_the_librarys_projection(any_pair: Any, make_encoder: Any) -> None:
    """The rows of a batch are the projected token states in fp16, in its order, one for each token."""
    model = any_pair.served
    batch = batch_of(model, TEXTS)
    rows = await make_encoder(model).encode(batch)
    tokens = documents(model, TEXTS)
    expected = Aligner(model.head, 1.0).project(model.backbone.encode(tokens), "texts")
    assert rows.values.dtype == np.float16
    assert rows.values.shape == (len(tokens.values), model.config.width)
    np.testing.assert_allclose(rows.values, expected, atol=2e-3)
    np.testing.assert_array_equal(rows.lengths, tokens.lengths)
    assert (rows.fingerprint, rows.projected) == (any_pair.classifier.fingerprint, True)


async def test_token_states_where_projection_is_elsewhere(any_pair: Any, make_encoder: Any) -> None:
    """With project_on_encoder off, the rows are the encoder's states themselves, of the encoder's width."""
    model = any_pair.served
    rows = await make_encoder(model, settings_of(project_on_encoder=False)).encode(batch_of(model, TEXTS))
    expected = model.backbone.encode(documents(model, TEXTS)).float().numpy()
    assert rows.values.shape == (len(expected), model.config.backbone_width)
    np.testing.assert_allclose(rows.values, expected, atol=5e-3)
    assert rows.projected is False


async def test_it_tells_what_it_serves(bert: Any, make_encoder: Any) -> None:
    """The identity has the backbone's and the model's fingerprint, as the library gives it."""
    identity = await make_encoder(bert.served).describe()
    assert identity.fingerprint == bert.classifier.fingerprint
    assert identity.backbone == bert.classifier.backbone.identity


async def test_ids_of_another_model_are_refused(bert: Any, make_encoder: Any) -> None:
    """A batch whose fingerprint differs is refused before anything is computed."""
    batch = EncodeBatch.of("another", documents(bert.served, TEXTS), Priority.DOCUMENTS)
    with pytest.raises(FingerprintMismatchError, match="another"):
        await make_encoder(bert.served).encode(batch)


async def test_ids_outside_of_the_vocabulary(bert: Any, make_encoder: Any) -> None:
    """Ids that the encoder has no row for are an error, not a crash."""
    tokens = documents(bert.served, ["card"])
    batch = batch_of(bert.served, ["card"])
    broken = EncodeBatch(batch.fingerprint, tokens.values + 1_000_000, tokens.lengths, Priority.DOCUMENTS, 0)
    with pytest.raises(InputError, match="vocabulary"):
        await make_encoder(bert.served).encode(broken)


@pytest.mark.parametrize("project", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_numbers_that_are_none(gated: Any, make_encoder: Any, project: bool, value: float) -> None:
    """NaN or infinity from the encoder is an error that says of what kind the batch was; the next batch is served."""
    encoder = make_encoder(gated.model, settings_of(project_on_encoder=project))

    def poison(batch: Any, states: Any) -> Any:
        states = states.clone()
        states[-1, 0] = value
        return states

    gated.backbone.change = poison
    with pytest.raises(NumericalError, match="documents"):
        await encoder.encode(batch_of(gated.model, TEXTS))
    gated.backbone.change = lambda batch, states: states
    await encoder.encode(batch_of(gated.model, TEXTS))


async def test_the_event_loop_runs_during_a_forward_pass(
    gated: Any, make_encoder: Any, until: Callable[[Callable[[], bool]], Any]
) -> None:
    """While a forward pass is under way the loop serves others, which here let the pass go on."""
    encoder = make_encoder(gated.model)
    gated.backbone.gate.clear()
    encoding = asyncio.create_task(encoder.encode(batch_of(gated.model, TEXTS)))
    await until(lambda: len(gated.backbone.seen) == 1)
    assert await encoder.describe()
    assert not encoding.done()
    gated.backbone.gate.set()
    await encoding


async def test_one_bad_batch_in_a_pass(
    gated: Any, make_encoder: Any, until: Callable[[Callable[[], bool]], Any]
) -> None:
    """Batches share a pass; where one of them has no finite numbers, the others get their rows all the same."""
    encoder = make_encoder(gated.model)
    bad, good = batch_of(gated.model, ["a much longer text"]), batch_of(gated.model, TEXTS)
    expected = (await encoder.encode(good)).values
    gated.backbone.gate.clear()

    def poison(batch: Any, states: Any) -> Any:
        if batch.lengths.max() < bad.lengths[0]:
            return states
        states = states.clone()
        states[:, 0] = float("nan")
        return states

    gated.backbone.change = poison
    gated.backbone.seen.clear()
    first = asyncio.create_task(encoder.encode(batch_of(gated.model, ["first"])))
    await until(lambda: len(gated.backbone.seen) == 1)
    sent = [asyncio.create_task(encoder.encode(batch)) for batch in (good, bad)]
    await until(lambda: encoder.record_autoscaling_stats()["tokens_in_hand"] > len(good.ids) + len(bad.ids))
    gated.backbone.gate.set()
    await first
    rows, error = await asyncio.gather(*sent, return_exceptions=True)
    assert isinstance(error, NumericalError)
    assert not isinstance(rows, BaseException)
    np.testing.assert_allclose(rows.values, expected, atol=2e-3)
    assert [len(batch) for batch in gated.backbone.seen] == [1, len(TEXTS) + 1, len(TEXTS), 1]


async def test_idle_threads_share_a_batch(gated: Any, make_encoder: Any) -> None:
    """A batch that finds several threads idle is computed by all of them, and its rows come in its order."""
    texts = [f"text number {i} of a batch that is worth sharing" for i in range(64)]
    alone = await make_encoder(gated.model).encode(batch_of(gated.model, texts))
    gated.backbone.seen.clear()
    settings = Settings.parse({"model": {"device": "cpu"}, "threads": {"encoder": 3}})
    shared = await make_encoder(gated.model, settings).encode(batch_of(gated.model, texts))
    assert len(gated.backbone.seen) == 3
    np.testing.assert_allclose(shared.values, alone.values, atol=2e-3)


async def test_a_long_pass_is_shared_out_before_others_are_idle(
    gated: Any, make_encoder: Any, monkeypatch: pytest.MonkeyPatch, until: Callable[[Callable[[], bool]], Any]
) -> None:
    """Behind another batch a short pass waits for one thread as a whole, a long one for all threads in shares."""
    texts = [f"text number {i} of a batch that is worth sharing" for i in range(64)]
    settings = Settings.parse({"model": {"device": "cpu"}, "threads": {"encoder": 2}})
    found = {}
    for name, bound in (("short", float("inf")), ("long", 0.0)):
        monkeypatch.setattr("deploy.encoder.LONG_PASS", bound)
        encoder = make_encoder(gated.model, settings)
        gated.backbone.seen.clear()
        gated.backbone.gate.clear()
        first = asyncio.create_task(encoder.encode(batch_of(gated.model, texts)))
        await until(lambda: len(gated.backbone.seen) == 2)
        second = asyncio.create_task(encoder.encode(batch_of(gated.model, texts)))
        await until(lambda made=encoder: made._worker.waiting > 0)
        gated.backbone.gate.set()
        one, other = await asyncio.gather(first, second)
        np.testing.assert_allclose(one.values, other.values, atol=2e-3)
        found[name] = sorted(len(batch) for batch in gated.backbone.seen)
    assert found == {"short": [32, 32, 64], "long": [32, 32, 32, 32]}


@pytest.mark.parametrize(
    ("device", "asked", "expected"),
    [("cpu", 3, 3), ("cpu", 0, available_cores()), ("cuda:1", 0, 2), ("cuda", 8, 2), ("mps", 8, 1)],
)
def test_computing_threads(device: str, asked: int, expected: int) -> None:
    """On a CPU as many as asked for, or one per core; on CUDA two, so that copies run beside kernels."""
    assert computing_threads(torch.device(device), ThreadSettings(encoder=asked)) == expected


async def test_a_gpu_has_two_whole_passes_in_flight(
    gated: Any, make_encoder: Any, monkeypatch: pytest.MonkeyPatch, until: Callable[[Callable[[], bool]], Any]
) -> None:
    """A second batch begins while the first is computed, neither is shared out, and each gets its own rows."""
    batches = [batch_of(gated.model, [f"{word} number {i} of many" for i in range(64)]) for word in ("text", "line")]
    expected = [(await make_encoder(gated.model).encode(batch)).values for batch in batches]
    monkeypatch.setattr(gated.backbone, "device", torch.device("cuda"))
    monkeypatch.setattr(AlignmentHead, "to", lambda self, device: self)  # there is no GPU to move to
    encoder = make_encoder(gated.model)
    gated.backbone.seen.clear()
    gated.backbone.gate.clear()
    first = asyncio.create_task(encoder.encode(batches[0]))
    await until(lambda: len(gated.backbone.seen) == 1)
    second = asyncio.create_task(encoder.encode(batches[1]))
    await until(lambda: len(gated.backbone.seen) == 2)
    gated.backbone.gate.set()
    rows = await asyncio.gather(first, second)
    assert [len(batch) for batch in gated.backbone.seen] == [64, 64]
    for got, wanted in zip(rows, expected, strict=True):
        np.testing.assert_allclose(got.values, wanted, atol=2e-3)


async def test_documents_go_before_labels(
    gated: Any, make_encoder: Any, until: Callable[[Callable[[], bool]], Any]
) -> None:
    """Of the batches that wait, documents are encoded first and together, labels in their order."""
    encoder = make_encoder(gated.model)
    gated.backbone.gate.clear()
    first = asyncio.create_task(encoder.encode(batch_of(gated.model, ["first"], Priority.LABELS)))
    await until(lambda: len(gated.backbone.seen) == 1)
    sent = [
        asyncio.create_task(encoder.encode(batch_of(gated.model, [text], priority)))
        for text, priority in [
            ("label a", Priority.LABELS),
            ("label bb", Priority.LABELS),
            ("document c", Priority.DOCUMENTS),
            ("document dd", Priority.DOCUMENTS),
        ]
    ]
    tokens = len(documents(gated.model, ["first", "label a", "label bb", "document c", "document dd"]).values)
    await until(lambda: encoder.record_autoscaling_stats()["tokens_in_hand"] == tokens)
    gated.backbone.gate.set()
    await asyncio.gather(first, *sent)
    order = [batch.values.tolist() for batch in gated.backbone.seen]
    expected = [["first"], ["document c", "document dd"], ["label a"], ["label bb"]]
    assert order == [documents(gated.model, texts).values.tolist() for texts in expected]


async def test_the_autoscaler_is_told_what_waits(
    gated: Any, make_encoder: Any, until: Callable[[Callable[[], bool]], Any]
) -> None:
    """Tokens in hand are counted while they are; tokens queued are those of the latest sender of documents."""
    encoder = make_encoder(gated.model)
    assert encoder.record_autoscaling_stats() == {"tokens_in_hand": 0.0, "tokens_queued": 0.0}
    gated.backbone.gate.clear()
    batches = [batch_of(gated.model, TEXTS, queued=70), batch_of(gated.model, ["card"], Priority.LABELS)]
    sent = [asyncio.create_task(encoder.encode(batch)) for batch in batches]
    await until(lambda: len(gated.backbone.seen) == 1)
    in_hand = sum(len(batch.ids) for batch in batches)
    assert encoder.record_autoscaling_stats() == {"tokens_in_hand": float(in_hand), "tokens_queued": 70.0}
    sent[1].cancel()
    await until(sent[1].done)
    gated.backbone.gate.set()
    await sent[0]
    assert encoder.record_autoscaling_stats()["tokens_in_hand"] == 0.0
