"""The scorer by itself: whose rows it takes, what it keeps, and what it tells of labels."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from deploy.label_cache import MemoryStore
from deploy.scorer import Scorer, scoring_device
from deploy.settings import Settings
from deploy.wire import (
    Answer,
    AskedLabels,
    EncodeBatch,
    EncodedRows,
    EncoderIdentity,
    PackedLabels,
    Priority,
    Question,
    ReplicaLostError,
    ScoreBatch,
)
from tokenalign import LabelSet
from tokenalign.backbone import Backbone, BackboneIdentity
from tokenalign.errors import ConfigError, FingerprintMismatchError, InputError
from tokenalign.head import AlignmentHead
from tokenalign.scoring import Aligner
from tokenalign.tokens import TokenBatch

TEXTS = ["card payment declined", "cash", "the card was charged twice, not received"]
LABELS = LabelSet.of(["cash", {"name": "card", "description": ["card declined", "not charged"]}, "payment"])


class Recording:
    """A store in memory that shows what it was given, and can be held up."""

    def __init__(self) -> None:
        self.inner = MemoryStore(2**24)
        self.keys: list[str] = []
        self.reads = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self.reads += 1
        await self.gate.wait()
        return await self.inner.get_many(keys)

    async def set_many(self, values: Mapping[str, bytes], ttl_s: float) -> None:
        self.keys += values
        await self.inner.set_many(values, ttl_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Replica:
    """An encoder replica as the scorer sees it; tests change what it serves and count what it is asked."""

    def __init__(self, model: Any) -> None:
        self.serve(model)
        self.asked: list[EncodeBatch] = []
        self.described = 0
        self.failure: Exception | None = None
        self.stated: str | None = None

    def serve(self, model: Any, backbone: Any = None) -> None:
        self.model = model
        self.backbone = backbone or model.backbone
        self.identity = EncoderIdentity(self.backbone.identity, model.fingerprint(self.backbone.identity))

    async def describe(self) -> EncoderIdentity:
        self.described += 1
        return self.identity

    async def encode(self, batch: EncodeBatch) -> EncodedRows:
        self.asked.append(batch)
        if self.failure is not None:
            raise self.failure
        if batch.fingerprint != self.identity.fingerprint:
            raise FingerprintMismatchError("the batch", self.identity.fingerprint, batch.fingerprint)
        rows = self.rows(batch.tokens())
        return rows if self.stated is None else replace(rows, fingerprint=self.stated)

    @property
    def labels_asked(self) -> list[EncodeBatch]:
        return [batch for batch in self.asked if batch.priority is Priority.LABELS]

    def rows(self, tokens: TokenBatch) -> EncodedRows:
        values = Aligner(self.model.head, 1.0).project(self.backbone.encode(tokens), "rows")
        return EncodedRows(self.identity.fingerprint, values, tokens.lengths, True)

    def ask(self, *questions: Question, sets: tuple[LabelSet, ...] = (LABELS,)) -> ScoreBatch:
        """The texts and questions about them; by default one for each."""
        tokens = self.model.tokenizer.documents(TEXTS).tokens
        wanted = questions or tuple(Question(i, 0, False, None) for i in range(len(TEXTS)))
        documents = EncodeBatch.of(self.identity.fingerprint, tokens, Priority.DOCUMENTS)
        asked = tuple(AskedLabels(PackedLabels.of(labels)) for labels in sets)
        return ScoreBatch(documents, tokens.keep, np.ones(len(tokens), np.int32), asked, wanted)


@pytest.fixture
def replica(bert: Any) -> Replica:
    return Replica(bert.served)


@pytest.fixture
def store() -> Recording:
    return Recording()


@pytest.fixture
def settings() -> Settings:
    """The store gets all the time that a held-up look-up needs."""
    return Settings.parse({"model": {"device": "cpu"}, "label_cache": {"store_budget_s": 60}})


@pytest.fixture
async def scorer(bert: Any, replica: Replica, store: Recording, settings: Settings) -> AsyncIterator[Scorer]:
    made = Scorer(settings, replica.encode, replica.describe, store, bert.served)
    yield made
    await made.close()


@pytest.fixture(scope="module")
def bfloat16(bert: Any) -> Backbone:
    """The tiny BERT in another dtype: other numbers, so another fingerprint."""
    return Backbone.load(bert.served.config, base=bert.served.folder, device="cpu", dtype="bfloat16")


async def test_answers_are_the_librarys(scorer: Scorer, replica: Replica, bert: Any) -> None:
    """One answer for each question, in order, with the library's logits and scores, best label first."""
    scored = await scorer.score(replica.ask())
    assert scored.fingerprint == bert.classifier.fingerprint
    expected = bert.classifier(TEXTS, LABELS, return_logits=True)
    for answer, reference in zip(scored.answers(), expected, strict=True):
        assert isinstance(answer, Answer)
        assert answer.fingerprint == scored.fingerprint
        best_first = [LABELS.names[i] for i in answer.order]
        assert best_first == list(reference["scores"])
        assert answer.logits.tolist() == pytest.approx(list(reference["logits"].values()), abs=1e-2)
        assert answer.scores.tolist() == pytest.approx(list(reference["scores"].values()), abs=1e-3)
        assert answer.alignments == ()


async def test_heads_are_where_scorers_compute(
    replica: Replica, settings: Settings, bert: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scorer's head is moved to `model.scorer_device`, a CPU unless something else is asked for."""
    moved: list[str] = []

    def move(head: AlignmentHead, device: torch.device) -> AlignmentHead:
        moved.append(str(device))
        return head  # there is no GPU to move to

    monkeypatch.setattr(AlignmentHead, "to", move)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_gpu = settings.model_copy(update={"model": settings.model.model_copy(update={"scorer_device": "cuda:0"})})
    for asked in (settings, on_gpu):
        await Scorer(asked, replica.encode, replica.describe, None, bert.served).close()
    assert moved == ["cpu", "cuda:0"]


@pytest.mark.parametrize(("device", "words"), [("cuda", "'cuda' is not available"), ("gpu", "'gpu' is unknown")])
def test_a_scorer_without_its_gpu(monkeypatch: pytest.MonkeyPatch, device: str, words: str) -> None:
    """The error names the setting and the device, and says how Ray comes to put it where there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=rf"model\.scorer_device: device {words}.*num_gpus") as caught:
        scoring_device(device)
    assert caught.value.__cause__ is not None


async def test_questions_in_any_order(scorer: Scorer, replica: Replica) -> None:
    """Questions may name documents twice, in any order, and leave some out; sets may take turns."""
    other = LabelSet.of(["twice", "received"])
    questions = [
        Question(2, 1, False, None),
        Question(0, 0, True, 1),
        Question(2, 0, "all", 2),
        Question(2, 1, True, None),
    ]
    scored = await scorer.score(replica.ask(*questions, sets=(LABELS, other)))
    plain = [
        (
            await scorer.score(replica.ask(Question(q.document, 0, False, None), sets=([LABELS, other][q.labels],)))
        ).answers()[0]
        for q in questions
    ]
    for answer, alone, count, top in zip(scored.answers(), plain, (0, 1, 2, 1), (2, 1, 2, 2), strict=True):
        assert isinstance(answer, Answer)
        assert isinstance(alone, Answer)
        np.testing.assert_array_equal(answer.order, alone.order[: len(answer.order)])
        np.testing.assert_allclose(answer.logits, alone.logits[: len(answer.order)], atol=1e-5)
        np.testing.assert_allclose(answer.scores, alone.scores[: len(answer.order)], atol=1e-5)
        assert (len(answer.alignments), len(answer.order)) == (count, top)


async def test_labels_are_encoded_once_and_behind_documents(scorer: Scorer, replica: Replica) -> None:
    """All descriptions go to the encoder in one batch of label priority, and not again for the next question."""
    for _ in range(2):
        await scorer.score(replica.ask())
    [batch] = replica.labels_asked
    assert len(batch.lengths) == len(LABELS.descriptions)


async def test_many_labels_go_in_chunks(bert: Any, replica: Replica) -> None:
    """A long list is encoded in batches of at most max_batch_tokens, and scores as if it were one."""
    names = [f"label number {i} of many" for i in range(40)]
    settings = Settings.parse({"model": {"device": "cpu"}, "batching": {"max_batch_tokens": 100}})
    scorer = Scorer(settings, replica.encode, replica.describe, None, bert.served)
    [answer, *_] = (await scorer.score(replica.ask(sets=(LabelSet.of(names),)))).answers()
    assert len(replica.labels_asked) > 2
    assert all(len(batch.ids) <= 100 for batch in replica.labels_asked)
    assert sum(len(batch.lengths) for batch in replica.labels_asked) == len(names)
    assert isinstance(answer, Answer)
    expected = bert.classifier(TEXTS[0], names)["scores"]
    assert {names[i]: score for i, score in zip(answer.order, answer.scores, strict=True)} == pytest.approx(
        expected, abs=1e-3
    )
    await scorer.close()


async def test_a_label_without_tokens(scorer: Scorer, replica: Replica) -> None:
    """Only the questions about that list get the error, which says where the label stands; it is not encoded."""
    bad = LabelSet.of(["a", {"name": "b", "description": ["c", "\u200b"]}])
    scored = await scorer.score(
        replica.ask(Question(0, 0, False, None), Question(0, 1, False, None), sets=(bad, LABELS))
    )
    error, answer = scored.answers()
    assert isinstance(error, InputError)
    assert error.loc == ("labels", 1, "description", 1)
    assert isinstance(answer, Answer)
    assert len(replica.labels_asked) == 1


async def test_warnings_come_with_every_answer(scorer: Scorer, replica: Replica) -> None:
    """A list with a cut label is reported as such from the cache as well, and a list beside it isn't."""
    long = LabelSet.of(["card " * 300, "cash"])
    for _ in range(2):
        asked = replica.ask(Question(0, 0, False, None), Question(0, 1, False, None), sets=(long, LABELS))
        cut, plain = (await scorer.score(asked)).answers()
        assert isinstance(cut, Answer)
        assert isinstance(plain, Answer)
        assert [warning["type"] for warning in cut.report.warnings] == ["truncated"]
        assert plain.report.warnings == ()


async def test_it_meets_the_encoder_once(scorer: Scorer, replica: Replica) -> None:
    """What the encoder serves is asked for at the start, not for every batch."""
    await scorer.start()
    await scorer.score(replica.ask())
    await scorer.score(replica.ask())
    assert replica.described == 1
    assert await scorer.describe() == replica.identity.fingerprint


async def test_without_a_start_it_meets_the_encoder_at_its_first_batch(scorer: Scorer, replica: Replica) -> None:
    """Batches that come together before the encoder is known ask for it once."""
    await asyncio.gather(*(scorer.score(replica.ask()) for _ in range(3)))
    assert replica.described == 1


async def test_a_stale_scorer_meets_the_new_encoder(
    scorer: Scorer, replica: Replica, bert: Any, bfloat16: Backbone, store: Recording
) -> None:
    """A batch of an unknown model has it ask the encoder again; it goes on with that one, under that one's keys."""
    old = replica.identity.fingerprint
    await scorer.score(replica.ask())
    replica.serve(bert.served, bfloat16)
    scored = await scorer.score(replica.ask())
    assert scored.fingerprint == replica.identity.fingerprint != old
    assert [answer.report.cached for answer in scored.answers() if isinstance(answer, Answer)] == [0, 0, 0]
    prints = {key.split(":")[2] for key in store.keys}
    assert prints <= {bert.served.label_fingerprint(i) for i in (bert.served.backbone.identity, bfloat16.identity)}


async def test_rows_of_another_model(scorer: Scorer, replica: Replica) -> None:
    """Rows that come back under another model's name than they were asked under are refused."""
    await scorer.score(replica.ask())  # so that its labels are known
    replica.stated = "strange"
    with pytest.raises(FingerprintMismatchError, match="encoded rows"):
        await scorer.score(replica.ask())
    replica.stated = None
    await scorer.score(replica.ask())


async def test_questions_of_another_model(scorer: Scorer, replica: Replica) -> None:
    """Questions of a model that neither this scorer nor the encoder has are refused, after the encoder was asked."""
    await scorer.start()
    batch = replica.ask()
    with pytest.raises(FingerprintMismatchError, match="questions"):
        await scorer.score(replace(batch, documents=replace(batch.documents, fingerprint="strange")))
    assert replica.described == 2
    assert replica.asked == []


async def test_an_encoder_with_another_head(scorer: Scorer, replica: Replica) -> None:
    """An encoder whose fingerprint isn't what this head gives on that backbone is refused at the start."""
    own = replica.identity
    replica.identity = replace(own, fingerprint="of another head")
    with pytest.raises(FingerprintMismatchError, match="encoder"):
        await scorer.start()
    replica.identity = own
    await scorer.start()


@pytest.mark.parametrize("failure", [FingerprintMismatchError("labels", "a", "b"), ReplicaLostError("gone")])
async def test_label_encoding_that_is_worth_another_try(
    scorer: Scorer, replica: Replica, store: Recording, failure: Exception
) -> None:
    """A changed or lost encoder is an error of the whole batch, so that it is sent again; nothing is kept of it."""
    replica.failure = failure
    with pytest.raises(type(failure)):
        await scorer.score(replica.ask())
    assert store.keys == []
    replica.failure = None
    [answer, *_] = (await scorer.score(replica.ask())).answers()
    assert isinstance(answer, Answer)
    assert answer.report.cached == 0


async def test_rows_of_another_model_are_never_kept(scorer: Scorer, replica: Replica, store: Recording) -> None:
    """Label rows that come back under another fingerprint than they were asked under reach neither tier."""
    asked = replica.ask()
    replica.stated = "another"
    with pytest.raises(FingerprintMismatchError):
        await scorer.score(asked)
    assert store.keys == []
    replica.stated = None
    [answer, *_] = (await scorer.score(asked)).answers()
    assert isinstance(answer, Answer)
    assert answer.report.cached == 0


async def test_a_look_up_that_a_rollout_overtakes(
    scorer: Scorer,
    replica: Replica,
    bert: Any,
    bfloat16: Backbone,
    store: Recording,
    until: Callable[[Callable[[], bool]], Any],
) -> None:
    """A look-up that began for the old model never keeps the new encoder's rows under the old name."""
    await scorer.start()
    old = bert.served.label_fingerprint(replica.identity.backbone)
    store.gate.clear()
    overtaken = asyncio.create_task(scorer.score(replica.ask()))
    await until(lambda: store.reads == 1)
    replica.serve(bert.served, bfloat16)
    newer = asyncio.create_task(scorer.score(replica.ask()))
    await until(lambda: store.reads == 2)
    store.gate.set()
    with pytest.raises(FingerprintMismatchError):
        await overtaken
    assert (await newer).fingerprint == replica.identity.fingerprint
    await until(lambda: bool(store.keys))
    assert not [key for key in store.keys if old in key]


async def test_a_signing_key_from_a_file(
    bert: Any, replica: Replica, store: Recording, tmp_path: Any, settings: Settings
) -> None:
    """Entries that were written without the key are not taken; those written with it are."""
    secret = tmp_path / "key"
    secret.write_text("known-to-the-test")
    signed = Settings.parse({"model": {"device": "cpu"}, "label_cache": {"signing_key": {"file": str(secret)}}})
    found = []
    for options in (settings, signed, signed):
        scorer = Scorer(options, replica.encode, replica.describe, store, bert.served)
        [answer, *_] = (await scorer.score(replica.ask())).answers()
        assert isinstance(answer, Answer)
        found.append(answer.report.cached)
        await scorer.close()
    assert found == [0, 0, len(LABELS.descriptions)]


async def test_two_encoders_of_one_head_have_names_of_their_own(bert: Any, bfloat16: Backbone) -> None:
    """The label fingerprint tells two dtypes of one encoder apart, so that old and new replicas never share rows."""
    identities: list[BackboneIdentity] = [bert.served.backbone.identity, bfloat16.identity]
    assert len({bert.served.label_fingerprint(identity) for identity in identities}) == 2
