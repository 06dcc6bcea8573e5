"""Fixtures for the dialects: the tiny BERT with a configured label set, and a service without a model."""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.batching import QueueFull
from deploy.http.routes import build_http_app
from deploy.http.schemas import ClassifyQuery
from deploy.label_sets import Definition, UnknownLabelSetError
from deploy.settings import LimitSettings
from tokenalign import LabelSet

LIMITS = LimitSettings(max_texts=4, max_labels=6, max_text_chars=200, max_body_bytes=8_192)
SCALE = 20.0


class EchoService:
    """Answers like the ingress, with numbers that depend on text and label alone; keeps the queries.

    failure: raised instead of an answer, where a test sets it
    """

    def __init__(self) -> None:
        self.queries: list[ClassifyQuery] = []
        self.failure: Exception | None = None
        self.full: QueueFull | None = None
        self.predicted: str | None = None

    def check_room(self) -> None:
        if self.full is not None:
            raise self.full

    async def classify(self, query: ClassifyQuery) -> dict[str, Any]:
        self.queries.append(query)
        if self.failure is not None:
            raise self.failure
        return {
            "results": [self._result(query, i, text) for i, text in enumerate(query.texts)],
            "warnings": [],
            "model": {"name": query.model or "echo", "fingerprint": "0" * 64},
            "usage": {"text_tokens": sum(map(len, query.texts)), "labels": 1, "labels_cached": 0},
        }

    async def classify_stream(self, query: ClassifyQuery) -> AsyncGenerator[dict[str, Any], None]:
        yield await self.classify(query)

    def _result(self, query: ClassifyQuery, i: int, text: str) -> dict[str, Any]:
        names = query.labels_of(i).names
        scores: list[Any] = [{"label": name, "score": _number(text, name)} for name in names]
        if query.return_logits:
            scores = [{**score, "logit": (score["score"] - 0.1) * SCALE} for score in scores]
        scores.sort(key=lambda score: -score["score"])
        cut = {"tokens": len(text), "used": 100, "cut_at": 100} if len(text) > 100 else None
        return {"label": scores[0]["label"], "score": scores[0]["score"], "scores": scores, "truncation": cut}

    async def add_label_set(self, labels: LabelSet, name: str | None, *, tenant: str | None) -> Any:
        raise NotImplementedError

    async def label_set(self, set_id: str, *, tenant: str | None) -> Definition:
        known = Definition.of(LabelSet.of(["first", "second"]), None)
        if set_id != known.set_id:
            raise UnknownLabelSetError(set_id)
        return known

    async def delete_label_set(self, set_id: str, *, tenant: str | None) -> None:
        raise NotImplementedError

    def predict_label_set(self) -> str | None:
        return self.predicted

    async def ready(self) -> None:
        if self.failure is not None:
            raise self.failure

    def model_info(self) -> dict[str, Any]:
        return {"name": "echo"}

    def models_info(self) -> dict[str, Any]:
        return {"models": [{"name": "echo", "default": True}, {"name": "team/other", "default": False}]}

    def logit_scale(self, model: str) -> float:
        return SCALE


def _number(text: str, name: str) -> float:
    return hashlib.sha256(f"{text}\x00{name}".encode()).digest()[0] / 256


@pytest.fixture
def service() -> EchoService:
    """A service without a model."""
    return EchoService()


@pytest.fixture
async def echo(service: EchoService) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the routes over a service without a model; an exception that leaves the application fails a test."""
    transport = httpx.ASGITransport(build_http_app(service, LIMITS))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as opened:
        yield opened


@pytest.fixture
async def bert_app(run_stack: Callable[..., Any], bert: Any, tmp_path: Path) -> AsyncIterator[Any]:
    """A running application on the tiny BERT, whose `/predict` scores against three labels of the settings."""
    labels = tmp_path / "labels.txt"
    labels.write_text("card payment\ncash declined\nnot received\n")
    listed = {"warm": [{"file": str(labels), "name": "card questions"}]}
    async with run_stack(bert, label_sets=listed, dialects={"predict_label_set": "card questions"}) as stack:
        yield stack
