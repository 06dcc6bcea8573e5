"""Fixtures for the service's tests: a whole application in one process, on models that are loaded once a session."""

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from deploy.encoder import Encoder
from deploy.http.routes import build_http_app
from deploy.http.tenants import Tenants
from deploy.http.watch import Watch
from deploy.ingress import Ingress
from deploy.label_cache import MemoryStore, Store
from deploy.model import Models, ServedModel
from deploy.scorer import Scorer
from deploy.settings import ModelSettings, Settings
from deploy.telemetry import NoSink, Sink
from deploy.tracing import NO_TRACER, Tracer
from deploy.wire import EncodeBatch, EncodedRows, EncoderIdentity, LabelReport, ScoreBatch, ScoredBatch
from tokenalign import LabelSet, TokenAlignClassifier
from tokenalign.backbone import Backbone
from tokenalign.weights import load_head

AnyT = TypeVar("AnyT")
MIB = 2**20

MODELS = ["minilm", "bert", *(pytest.param(name, marks=pytest.mark.data) for name in ("qwen3", "qwen35"))]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel(ServedModel):
    """A served model whose encoder is loaded already, so that all replicas of all tests share it."""

    backbone: Backbone

    def load_backbone(self) -> Backbone:
        return self.backbone


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One head as the service reads it, and the library's classifier on the same files."""

    served: LoadedModel
    classifier: TokenAlignClassifier

    def with_backbone(self, backbone: Any) -> LoadedModel:
        """The served model with another encoder."""
        return _with_backbone(self.served, backbone)


def _with_backbone(model: ServedModel, backbone: Any) -> LoadedModel:
    own = {field.name: getattr(model, field.name) for field in fields(ServedModel)}
    return LoadedModel(**own, backbone=backbone)


LoadPair = Callable[..., Pair]


@pytest.fixture(scope="session")
def load_pair() -> LoadPair:
    """Loads a head for both sides; None is the shipped default.

    one_tokenizer: the service's side takes the library's, since Qwen's takes seconds to read
    """

    def load(folder: Path | None, *, one_tokenizer: bool = False) -> Pair:
        classifier = TokenAlignClassifier.from_pretrained(folder, device="cpu")
        settings = ModelSettings(id_or_path=None if folder is None else str(folder), device="cpu")
        if one_tokenizer and folder is not None:
            served = ServedModel(settings, folder, *load_head(folder), classifier.tokenizer)
        else:
            served = ServedModel.load(settings)
        return Pair(_with_backbone(served, classifier.backbone), classifier)

    return load


@pytest.fixture(scope="session")
def minilm(load_pair: LoadPair) -> Pair:
    """The shipped default head."""
    return load_pair(None)


@pytest.fixture(scope="session")
def bert(load_pair: LoadPair, bert_head: Path) -> Pair:
    """A random head on the tiny BERT: the quick one."""
    return load_pair(bert_head)


@pytest.fixture(scope="session")
def qwen3(load_pair: LoadPair, qwen3_head: Path) -> Pair:
    """A random head on the tiny Qwen3, with a label template."""
    return load_pair(qwen3_head, one_tokenizer=True)


@pytest.fixture(scope="session")
def qwen35(load_pair: LoadPair, qwen35_head: Path) -> Pair:
    """A random head on the tiny Qwen3.5."""
    return load_pair(qwen35_head, one_tokenizer=True)


@pytest.fixture(params=MODELS)
def any_pair(request: pytest.FixtureRequest) -> Pair:
    """The shipped default, and a head on each kind of tiny encoder."""
    pair: Pair = request.getfixturevalue(request.param)
    return pair


def crossed(value: AnyT) -> AnyT:
    """`value` as another process receives it: pickled, and its arrays read-only, as Ray hands them out."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    received: AnyT = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])  # noqa: S301  our own bytes
    return received


class Stack:
    """A whole application in one process, whose parts may be exchanged while it runs, as a rollout does.

    slots: how many batches may be in flight; sent, encoded: what went out so far
    failures: errors that the next sends end with, the first one first
    sink, tracer: who is told what there is to watch
    """

    def __init__(
        self,
        model: ServedModel | Models,
        settings: Settings,
        store: Store | None,
        sink: Sink | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.settings = settings
        self.store = store
        self.slots = 2
        self.sent: list[ScoreBatch] = []
        self.encoded: list[EncodeBatch] = []
        self.failures: list[Exception] = []
        self.encoder = Encoder(settings, model, sink=sink, tracer=tracer)
        self.scorer = Scorer(settings, self.encode, self.describe, store, model, sink, tracer)
        self.ingress = Ingress(
            settings,
            self._send,
            self.describe,
            self._warm,
            lambda: self.slots,
            store,
            model,
            sink=sink,
            tracer=tracer,
        )
        self.watch = Watch(sink or NoSink(), tracer)
        tenants = Tenants(per_key=settings.label_cache.tenant_per_key)
        self.app = build_http_app(self.ingress, settings.limits, tenants, watch=self.watch)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")

    async def encode(self, batch: EncodeBatch) -> EncodedRows:
        """What a handle to the encoder gives."""
        self.encoded.append(batch)
        return crossed(await self.encoder.encode(crossed(batch)))

    async def describe(self) -> EncoderIdentity:
        """What a handle to the encoder tells of it."""
        return crossed(await self.encoder.describe())

    async def _send(self, batch: ScoreBatch) -> ScoredBatch:
        self.sent.append(batch)
        if self.failures:
            raise self.failures.pop(0)
        return crossed(await self.scorer.score(crossed(batch)))

    async def _warm(self, fingerprint: str, labels: LabelSet, tenant: str | None) -> LabelReport:
        if self.failures:
            raise self.failures.pop(0)
        return crossed(await self.scorer.warm(fingerprint, crossed(labels), tenant))

    async def replace_encoder(self, model: ServedModel) -> None:
        """The encoder's replica ends, and one with another model stands in its place."""
        await self.encoder.close()
        self.encoder = Encoder(self.settings, model)

    async def drain(self) -> None:
        """Returns once the label cache has nothing under way."""
        await self.scorer.drain()

    @property
    def waiting_texts(self) -> int:
        """How many texts wait for a batch."""
        return self.ingress._batcher.queued_items

    async def post(self, **body: Any) -> httpx.Response:
        """The response to a classify request."""
        return await self.client.post("/v1/classify", json=body)

    async def ask(self, **body: Any) -> dict[str, Any]:
        """The answer to a classify request that must succeed."""
        response = await self.post(**body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def together(self, *bodies: Mapping[str, Any]) -> list[httpx.Response]:
        """The responses to requests that travel in one batch."""
        slots, self.slots = self.slots, 0
        requests = [asyncio.create_task(self.post(**body)) for body in bodies]
        texts = sum(len(body["texts"]) if "texts" in body else 1 for body in bodies)
        await until(lambda: self.waiting_texts == texts or any(request.done() for request in requests))
        batches, self.slots = len(self.sent), slots
        responses = await asyncio.gather(*requests)
        assert len(self.sent) == batches + 1, "they did not travel in one batch"
        return responses

    async def close(self) -> None:
        await self.client.aclose()
        await self.ingress.close()
        await self.scorer.close()
        await self.encoder.close()


async def until(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds; the event loop runs on meanwhile."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  conditions of any kind, other threads' among them
            await asyncio.sleep(0)


@pytest.fixture(name="until")
def until_fixture() -> Callable[[Callable[[], bool]], Any]:
    """Waits for a condition."""
    return until


@pytest.fixture(name="crossed")
def crossed_fixture() -> Callable[[Any], Any]:
    """Gives a value as another process receives it."""
    return crossed


RunStack = Callable[..., AbstractAsyncContextManager[Stack]]


@pytest.fixture
def run_stack() -> RunStack:
    """Runs an application on a pair's model, or on any model; keywords are sections of the settings.

    start=False leaves it at the point where it waits for its first request to go through.
    """

    @asynccontextmanager
    async def run(
        of: Pair | ServedModel | Models,
        /,
        *,
        store: Store | str | None = "memory",
        start: bool = True,
        sink: Sink | None = None,
        tracer: Tracer = NO_TRACER,
        **sections: Any,
    ) -> AsyncIterator[Stack]:
        served = of.served if isinstance(of, Pair) else of
        opened = MemoryStore(64 * MIB) if isinstance(store, str) else store
        stack = Stack(served, Settings.parse({"model": {"device": "cpu"}, **sections}), opened, sink, tracer)
        try:
            if start:
                await stack.scorer.start()
                await stack.ingress.start()
                stack.sent.clear()
                stack.encoded.clear()
            yield stack
        finally:
            await stack.close()

    return run


@pytest.fixture
async def stack(run_stack: RunStack, bert: Pair) -> AsyncIterator[Stack]:
    """A running application on the tiny BERT, with all settings as they come."""
    async with run_stack(bert) as running:
        yield running


@pytest.fixture(params=[True, False], ids=["projected rows", "token states"])
async def any_stack(request: pytest.FixtureRequest, run_stack: RunStack, any_pair: Pair) -> AsyncIterator[Stack]:
    """A running application on each model, with the projection on the encoder or on the scorer."""
    async with run_stack(any_pair, model={"device": "cpu", "project_on_encoder": request.param}) as running:
        yield running


class GatedBackbone:
    """A backbone that waits inside of its forward pass until a test lets it go on, or gives what a test wants.

    seen: the batches that it began with
    """

    def __init__(self, inner: Backbone) -> None:
        self._inner = inner
        self.identity, self.device, self.width = inner.identity, inner.device, inner.width
        self.token_multiply_adds = inner.token_multiply_adds
        self.seen: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.change: Callable[[Any, Any], Any] = lambda batch, states: states

    def encode(self, batch: Any, *, max_batch_tokens: int) -> Any:
        self.seen.append(batch)
        # The limit is no promise: without it, a pass that runs on the event loop would hold up the test for ever.
        assert self.gate.wait(60), "the event loop that should open the gate is blocked"
        return self.change(batch, self._inner.encode(batch, max_batch_tokens=max_batch_tokens))


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """A model whose forward passes a test controls."""

    backbone: GatedBackbone
    model: LoadedModel


@pytest.fixture
def gated(bert: Pair) -> Gated:
    """The tiny BERT's model, its encoder behind a gate that stands open."""
    backbone = GatedBackbone(bert.classifier.backbone)
    return Gated(backbone, bert.with_backbone(backbone))
