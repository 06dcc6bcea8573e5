"""The HTTP client, over a service that does what a test wants: what is sent, what comes back, what is tried again."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenalign
from deploy.http.routes import build_http_app
from deploy.http.schemas import ClassifyQuery
from deploy.label_sets import Definition, UnknownLabelSetError
from deploy.settings import LimitSettings
from tokenalign import Label, LabelSet
from tokenalign.client import (
    AsyncTokenAlignClient,
    AuthenticationError,
    InvalidAnswerError,
    NotFoundError,
    OverloadedError,
    RequestTooLargeError,
    ServiceConnectionError,
    ServiceDeadlineError,
    ServiceError,
    ServiceTimeoutError,
    ServiceUnavailableError,
    TokenAlignClient,
)
from tokenalign.client.requests import Question
from tokenalign.client.retries import Deadline, PhaseLimits, Retries, retry_after_s
from tokenalign.client.streams import Lines
from tokenalign.errors import ConfigError, FingerprintMismatchError, InputError, TokenAlignError

MODEL = {"name": "tiny", "fingerprint": "f" * 64}
USAGE = {"text_tokens": 3, "labels": 2, "labels_cached": 1}
LABELS = ["a", "b"]
LIMITS = {"max_texts": 2, "max_labels": 9, "max_text_chars": 100, "max_body_bytes": 1_000}


def result(text: str) -> dict[str, Any]:
    """A result that can be told from another text's."""
    score = 1 / (1 + len(text))
    ranked = [{"label": "b", "score": 1 - score, "logit": 2.5}, {"label": "a", "score": score, "logit": -1}]
    return {"label": "b", "score": 1 - score, "scores": ranked, "truncation": None}


def answer(*texts: str, **changes: Any) -> dict[str, Any]:
    """The service's answer for some texts."""
    return {"results": [result(t) for t in texts], "warnings": [], "model": MODEL, "usage": USAGE} | changes


def error(status: int, error_type: str, message: str = "bad", loc: Any = (), **headers: str) -> httpx.Response:
    """An error as the service gives it."""
    body = {"error": message, "error_type": error_type, "loc": list(loc)}
    return httpx.Response(status, json=body, headers={"x-request-id": "r1", **headers})


class Service:
    """Answers as `script` says, one entry a request, then as a good service would; keeps the requests."""

    def __init__(self) -> None:
        self.script: list[httpx.Response | Exception] = []
        self.requests: list[httpx.Request] = []
        self.limits = dict(LIMITS)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.script:
            step = self.script.pop(0)
            if isinstance(step, Exception):
                raise step
            # Anew each time: an answer is read once, by a client of one kind.
            return httpx.Response(step.status_code, headers=step.headers, content=step.content)
        if request.url.path.endswith("/v1/model"):
            return httpx.Response(200, json={**MODEL, "limits": self.limits})
        body = json.loads(request.content)
        texts = body.get("texts", [body.get("text")])
        for i, text in enumerate(texts):
            if text == "wrong":
                loc = ["texts", i] if "texts" in body else ["text"]
                return error(
                    422, "invalid_input", f"{'texts[' + str(i) + ']' if i or loc[1:] else 'text'}: is wrong", loc
                )
        return httpx.Response(200, json=answer(*texts))

    @property
    def bodies(self) -> list[Any]:
        """What was sent to classify."""
        return [json.loads(r.content) for r in self.requests if r.url.path.endswith("/v1/classify")]


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    async def asleep(self, seconds: float) -> None:
        self.sleep(seconds)


class Blocking:
    """The asynchronous client with the methods of the other one, so that a test holds for both."""

    def __init__(self, client: AsyncTokenAlignClient, runner: asyncio.Runner) -> None:
        self._client, self._runner = client, runner

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **options: Any) -> Any:
            return await getattr(self._client, name)(*args, **options)

        return lambda *args, **options: self._runner.run(call(*args, **options))

    def stream(self, *args: Any, **options: Any) -> tuple[list[Any], Any]:
        async def read() -> tuple[list[Any], Any]:
            async with self._client.classify_stream(*args, **options) as stream:
                return [item async for item in stream], stream

        return self._runner.run(read())


class Plain(TokenAlignClient):
    """The synchronous client, with a way to read a stream that both have."""

    def stream(self, *args: Any, **options: Any) -> tuple[list[Any], Any]:
        with self.classify_stream(*args, **options) as stream:
            return list(stream), stream


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def time() -> Time:
    return Time()


Make = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest, service: Service, time: Time) -> Iterator[Make]:
    """Makes a client of either kind for the service; keywords override its arguments."""
    with asyncio.Runner() as runner:
        opened: list[Any] = []

        def client(url: str = "http://service", **options: Any) -> Any:
            options = {"transport": httpx.MockTransport(service), "clock": time.clock, "jitter": lambda: 0.5} | options
            made: Any
            if request.param == "sync":
                made = Plain(url, sleep=time.sleep, **options)
                opened.append(made.close)
            else:
                made = Blocking(AsyncTokenAlignClient(url, sleep=time.asleep, **options), runner)
                opened.append(made.aclose)
            return made

        yield client
        for close in opened:
            close()


class TestClassify:
    def test_one_text_gives_the_librarys_result(self, make: Make, service: Service) -> None:
        """Scores and logits are dicts, best first, and the keys are those of a `Classification`."""
        found = make().classify("hello", LABELS)
        assert list(found["scores"].items()) == [("b", 1 - 1 / 6), ("a", 1 / 6)]
        assert list(found["logits"].items()) == [("b", 2.5), ("a", -1.0)]
        assert (found["label"], found["score"], found["truncation"], found["warnings"]) == ("b", 1 - 1 / 6, None, [])
        assert service.bodies == [{"text": "hello", "labels": LABELS}]

    def test_what_every_request_says(self, make: Make, service: Service) -> None:
        """Version and key go along; a path in the URL is kept as a prefix."""
        make("http://service/some/prefix/", api_key="secret").classify("x", LABELS)
        [request] = service.requests
        assert str(request.url) == "http://service/some/prefix/v1/classify"
        assert request.headers["user-agent"] == f"tokenalign-client/{tokenalign.__version__}"
        assert request.headers["authorization"] == "Bearer secret"
        assert request.headers["content-type"] == "application/json"

    def test_options_that_are_given_are_sent_and_no_others(self, make: Make, service: Service) -> None:
        """The service's defaults hold for what the caller leaves out, and null is sent where it is meant."""
        options = {"explain": "all", "top_k": None, "multi_label": True, "min_score": 0.5, "long_text": "window"}
        make().classify("x", label_set="0" * 32, **options)
        assert service.bodies == [{"text": "x", "label_set": "0" * 32, **options}]

    def test_an_unknown_option(self, make: Make, service: Service) -> None:
        """A slip of the pen is a TypeError, as with any function."""
        with pytest.raises(TypeError, match="no option 'topk'; there are explain, return_logits, top_k"):
            make().classify("x", LABELS, topk=3)
        assert service.requests == []

    def test_every_form_of_labels(self, make: Make, service: Service) -> None:
        """What the library takes as labels, the client takes."""
        labels = ["a", Label("b", ("b1", "b2")), {"name": "c", "description": "d"}, Label("e", ("e",))]
        sent = ["a", {"name": "b", "description": ["b1", "b2"]}, {"name": "c", "description": "d"}, "e"]
        client = make()
        client.classify("x", labels)
        client.classify("x", iter(labels))
        client.classify("x", LabelSet.of(labels))
        assert [body["labels"] for body in service.bodies[:2]] == [sent, sent]
        assert service.bodies[2]["labels"][1] == sent[1]

    @pytest.mark.parametrize(
        ("labels", "label_set", "words"),
        [(None, None, "neither is given"), (LABELS, "0" * 32, "both are given"), ("a, b", None, "wrap it in a list")],
    )
    def test_labels_that_can_not_be_sent(self, make: Make, labels: Any, label_set: Any, words: str) -> None:
        """One of labels and label_set is needed, and labels are a list."""
        with pytest.raises(InputError, match=words) as raised:
            make().classify("x", labels, label_set=label_set)
        assert raised.value.loc == ("labels",)

    def test_a_lone_surrogate_reaches_the_service(self, make: Make, service: Service) -> None:
        """The service says which text it stands in, so it is sent as an escape."""
        make().classify("x\ud800", LABELS)
        assert service.bodies[0]["text"] == "x\ud800"

    def test_characters_are_sent_as_they_are(self, make: Make, service: Service) -> None:
        """Not as escapes, which would make a Chinese text twice as long."""
        make().classify("日本", LABELS)
        assert "日本".encode() in service.requests[0].content

    @pytest.mark.parametrize("value", [float("nan"), object()])
    def test_what_json_can_not_hold(self, make: Make, service: Service, value: Any) -> None:
        """It is the caller's mistake and isn't sent."""
        with pytest.raises(InputError, match="can't be sent as JSON"):
            make().classify("x", LABELS, min_score=value)
        assert service.requests == []

    def test_keys_that_a_newer_service_adds(self, make: Make, service: Service) -> None:
        """They are passed on as they are, and a label may be null."""
        service.script = [httpx.Response(200, json=answer(results=[{**result("x"), "label": None, "why": ["low"]}]))]
        found = make().classify("x", LABELS)
        assert (found["label"], found["why"]) == (None, ["low"])


class TestManyTexts:
    def test_are_split_by_the_services_limit_and_keep_their_order(self, make: Make, service: Service) -> None:
        """The limit is asked for once; each request holds at most so many texts."""
        texts = ["x" * n for n in range(1, 6)]
        client = make()
        for _ in range(2):
            found = client.classify(texts, LABELS)
            assert [r["scores"]["a"] for r in found] == [1 / (1 + len(t)) for t in texts]
        assert sorted(body["texts"] for body in service.bodies[:3]) == [texts[:2], texts[2:4], texts[4:]]
        assert sum(r.url.path == "/v1/model" for r in service.requests) == 1

    def test_are_split_by_bytes_too(self, make: Make, service: Service) -> None:
        """A request stays within limits.max_body_bytes; a text that is too long alone is sent alone."""
        service.limits |= {"max_texts": 100, "max_body_bytes": 300}
        texts = ["é" * 40, "y" * 60, "z" * 900, *["w" * 20] * 9]
        make().classify(texts, LABELS)
        assert [t for body in service.bodies for t in body["texts"]] == texts
        sizes = [len(r.content) for r in service.requests if r.url.path == "/v1/classify"]
        assert sum(size > 300 for size in sizes) == 1
        assert len(sizes) < 7

    def test_an_error_names_the_callers_text(self, make: Make, service: Service) -> None:
        """Not its place within the request that it happened to be in."""
        with pytest.raises(InputError) as raised:
            make().classify(["1", "2", "3", "wrong"], LABELS)
        assert raised.value.loc == ("texts", 3)
        assert str(raised.value) == "texts[3]: is wrong"
        assert isinstance(raised.value.__cause__, ServiceError)
        assert raised.value.__cause__.request_id == "r1"

    def test_labels_per_text_are_split_with_their_texts(self, make: Make, service: Service) -> None:
        """Each request holds its own texts' lists, and places in them are moved."""
        lists = [["a", "b"], ["c", "d"], ["e", "f"]]
        client = make()
        response = client.classify_response(["1", "2", "3"], lists)
        assert sorted(body["labels"] for body in service.bodies) == [lists[:2], lists[2:]]
        assert response.usage == {"text_tokens": 6, "labels": 4, "labels_cached": 2}
        service.limits["max_texts"] = 1
        client.model()
        service.script = [error(422, "invalid_input", "labels[0][1]: no", ["labels", 0, 1])]
        with pytest.raises(InputError) as raised:
            client.classify(["1", "2"], lists[:2])
        assert raised.value.loc in {("labels", 0, 1), ("labels", 1, 1)}  # of the asynchronous ones either is first
        with pytest.raises(InputError, match="2 lists of labels for 3 texts"):
            client.classify(["1", "2", "3"], lists[:2])

    def test_no_texts_give_no_answers(self, make: Make, service: Service) -> None:
        """As with the library; no classify request is made."""
        client = make()
        assert client.classify([], LABELS) == []
        assert client.classify_response([], LABELS).model == MODEL
        assert service.bodies == []

    def test_everything_that_parts_share_is_joined(self, make: Make, service: Service) -> None:
        """A warning on labels is said once, one on a text names the caller's text, tokens are summed."""
        label = {"loc": ["labels", 0], "type": "truncated", "message": "cut"}
        text = {"loc": ["texts", 0], "type": "odd", "message": "odd"}
        info = httpx.Response(200, json={**MODEL, "limits": LIMITS})
        part = {"warnings": [label, text]}
        service.script = [info, *(httpx.Response(200, json=answer(*t, **part)) for t in (["1", "2"], ["3", "4"]))]
        response = make().classify_response(["1", "2", "3", "4"], LABELS)
        assert response.warnings == [label, text, text | {"loc": ["texts", 2]}]
        assert [[w["loc"] for w in r["warnings"]] for r in response.results[2:]] == [
            [["labels", 0], ["texts", 2]],
            [["labels", 0]],
        ]
        assert response.usage == {"text_tokens": 6, "labels": 2, "labels_cached": 1}
        assert response.model == MODEL

    def test_scores_of_two_models_are_not_mixed(self, make: Make, service: Service) -> None:
        """A rollout between two requests is an error that says so."""
        info = httpx.Response(200, json={**MODEL, "limits": LIMITS})
        other = httpx.Response(200, json=answer("3", model=MODEL | {"fingerprint": "e" * 64}))
        service.script = [info, httpx.Response(200, json=answer("1", "2")), other]
        with pytest.raises(FingerprintMismatchError):
            make().classify(["1", "2", "3"], LABELS)

    @given(
        texts=st.lists(st.text(max_size=40), max_size=30),
        max_texts=st.integers(1, 7),
        max_body_bytes=st.integers(1, 400),
        per_text=st.booleans(),
    )
    def test_parts_cover_all_texts_once(
        self, texts: list[str], max_texts: int, max_body_bytes: int, per_text: bool
    ) -> None:
        """In order, within both limits unless a part is one text."""
        labels: Any = [[f"é{i}", "b"] for i in range(len(texts))] if per_text else LABELS
        question = Question.of(texts, labels, None, {"explain": True})
        parts = question.parts(max_texts, max_body_bytes)
        sent = [json.loads(question.body(part)) for part in parts]
        assert [t for body in sent for t in body["texts"]] == texts
        assert all(len(part) == 1 or len(question.body(part)) <= max_body_bytes for part in parts)
        assert all(1 <= len(part) <= max_texts for part in parts)
        if per_text:
            assert [pair for body in sent for pair in body["labels"]] == labels


class TestErrors:
    @pytest.mark.parametrize(
        ("status", "kind", "family"),
        [
            (401, "unauthorized", AuthenticationError),
            (404, "unknown_label_set", NotFoundError),
            (413, "body_too_large", RequestTooLargeError),
            (429, "overloaded", OverloadedError),
            (500, "internal", ServiceError),
            (503, "not_ready", ServiceUnavailableError),
            (504, "deadline_exceeded", ServiceDeadlineError),
        ],
    )
    def test_each_status_has_its_type(
        self, make: Make, service: Service, status: int, kind: str, family: type[ServiceError]
    ) -> None:
        """All are of one family, and hold what the service said."""
        service.script = [error(status, kind, "what, which limit", ["texts", 1])]
        with pytest.raises(family, match=rf"{status}: what, which limit \(request r1\)") as raised:
            make(max_retries=0).classify("x", LABELS)
        found = raised.value
        assert (found.status, found.error_type, found.loc, found.request_id) == (status, kind, ("texts", 1), "r1")
        assert isinstance(found, TokenAlignError)
        assert len(service.requests) == 1

    def test_input_errors_are_the_librarys(self, make: Make) -> None:
        """The place is said once, and what the service sent is the cause."""
        with pytest.raises(InputError) as raised:
            make().classify("wrong", LABELS)
        assert (raised.value.loc, raised.value.message, str(raised.value)) == (("text",), "is wrong", "text: is wrong")
        assert isinstance(raised.value.__cause__, ServiceError)
        assert raised.value.__cause__.status == 422

    def test_a_proxys_error_page(self, make: Make, service: Service) -> None:
        """Its words are shown, shortened, and said to be none of the service's."""
        service.script = [httpx.Response(502, text="<h1>Bad\n\nGateway</h1>" + "x" * 1_000)]
        with pytest.raises(ServiceError, match=r"502: .*in between may have given it: <h1>Bad Gateway</h1>x+…$"):
            make().classify("x", LABELS)

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (json.dumps(answer("x")).replace("-1", "NaN"), "NaN is no JSON number"),
            (json.dumps(answer("x")).replace("-1", "1e999"), "a logit in the answer is no finite number"),
            ("<html>", "the answer is no JSON"),
            ("[]", "no JSON object"),
            ("[" * 100_000, "no JSON"),
            (json.dumps(answer("x", "y")), "2 results for 1 texts"),
            (json.dumps(answer("x", results=None)), "results is no list"),
            (json.dumps(answer("x", results=[{"label": "a", "score": 1}])), "scores is missing"),
            (json.dumps(answer("x", usage={})), "text_tokens is missing"),
            (json.dumps(answer("x", model={"name": "m"})), "fingerprint is missing"),
        ],
    )
    def test_an_answer_that_is_none(self, make: Make, service: Service, body: str, words: str) -> None:
        """It is an error that says what is wrong with it, and isn't asked for again."""
        service.script = [httpx.Response(200, content=body)]
        with pytest.raises(InvalidAnswerError, match=words):
            make().classify("x", LABELS)
        assert len(service.requests) == 1

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"url": "service:8000"}, "must begin with http"),
            ({"url": "http://h/?a=1"}, "a query"),
            ({"timeout_s": 0}, "timeout_s: must be over 0"),
            ({"read_timeout_s": float("nan")}, "read_timeout_s"),
            ({"max_retries": -1}, "max_retries"),
            ({"max_connections": 0}, "max_connections"),
            ({"api_key": "a\nb"}, "api_key: must be printable"),
        ],
    )
    def test_arguments_that_can_not_be(self, make: Make, options: dict[str, Any], words: str) -> None:
        """The constructor names the argument."""
        with pytest.raises(ConfigError, match=words):
            make(**options)


class TestRetries:
    @pytest.mark.parametrize(
        "failure",
        [
            error(429, "overloaded"),
            error(503, "not_ready"),
            httpx.Response(503, text="no backend"),
            httpx.ConnectError("refused"),
            httpx.ReadError("reset"),
            httpx.RemoteProtocolError("Server disconnected without sending a response."),
        ],
    )
    def test_what_passes_is_asked_again(
        self, make: Make, service: Service, time: Time, failure: httpx.Response | Exception
    ) -> None:
        """After waits that double, each a random part of its bound."""
        service.script = [failure, failure, failure]
        assert make().classify("x", LABELS)["label"] == "b"
        assert time.sleeps == [0.125, 0.25, 0.5]
        assert len(service.bodies) == 4

    @pytest.mark.parametrize(
        "failure",
        [
            error(422, "invalid_input"),
            error(500, "internal"),
            error(504, "deadline_exceeded"),
            error(503, "label_sets_unavailable"),
            httpx.ReadTimeout("slow"),
        ],
    )
    def test_what_comes_again_is_not(
        self, make: Make, service: Service, time: Time, failure: httpx.Response | Exception
    ) -> None:
        """Among it a 503 of a service that has no store of label sets, and names no time to come again."""
        service.script = [failure]
        with pytest.raises(TokenAlignError):
            make().classify("x", LABELS)
        assert time.sleeps == []
        assert len(service.requests) == 1

    def test_they_end(self, make: Make, service: Service) -> None:
        """After max_retries the last error is raised."""
        service.script = [error(429, "overloaded")] * 9
        with pytest.raises(OverloadedError):
            make(max_retries=2).classify("x", LABELS)
        assert len(service.requests) == 3

    def test_retry_after_is_waited_for(self, make: Make, service: Service, time: Time) -> None:
        """In seconds or as a date, never less, with jitter on top so that callers don't come back all at once."""
        date, later = datetime(2030, 1, 1, tzinfo=UTC), datetime(2030, 1, 1, 0, 0, 7, tzinfo=UTC)
        dated = {"Date": format_datetime(date, usegmt=True), "Retry-After": format_datetime(later, usegmt=True)}
        service.script = [error(429, "overloaded", **{"Retry-After": "3"}), error(503, "not_ready", **dated)]
        make().classify("x", LABELS)
        assert time.sleeps == [3.125, 7.25]

    def test_the_deadline_is_not_slept_over(self, make: Make, service: Service, time: Time) -> None:
        """A wait that would outlast it isn't begun: the caller gets the error, with its Retry-After, at once."""
        service.script = [error(429, "overloaded", **{"Retry-After": "3"})] * 9
        with pytest.raises(OverloadedError) as raised:
            make(timeout_s=8.0).classify("x", LABELS)
        assert raised.value.retry_after_s == 3
        assert time.now - 100 < 8
        assert len(time.sleeps) == 2

    def test_the_deadline_covers_all_parts(self, make: Make, service: Service, time: Time) -> None:
        """Many requests of one call share its time."""

        def late(request: httpx.Request) -> httpx.Response:
            time.sleep(4.0)
            return service(request)

        slow = make(timeout_s=5.0, transport=httpx.MockTransport(late))
        with pytest.raises(ServiceTimeoutError, match=r"no answer within 5.0 s \(timeout_s\)"):
            slow.classify(["1", "2", "3", "4", "5"], LABELS)

    @pytest.mark.parametrize(
        ("value", "date", "expected"),
        [
            (None, None, None),
            ("0", None, 0),
            (" 12 ", None, 12),
            ("soon", None, None),
            ("-1", None, None),
            ("1.5", None, None),
            ("٣", None, None),
            ("9" * 5_000, None, None),
            ("Thu, 01 Jan 1970 00:01:40 GMT", None, 60),
            ("Thu, 01 Jan 1970 00:00:10 GMT", None, 0),
            ("Thu, 01 Jan 1970 00:01:40 GMT", "Thu, 01 Jan 1970 00:01:30 GMT", 10),
            ("Thu, 01 Jan 1970 00:01:40 GMT", "never", 60),
        ],
    )
    def test_reading_retry_after(self, value: str | None, date: str | None, expected: float | None) -> None:
        """What can't be read counts as not sent; a date in the past as now."""
        assert retry_after_s(value, date, now=lambda: 40.0) == expected

    @given(retry=st.integers(0, 5_000), jitter=st.floats(0, 1, exclude_max=True), left=st.floats(0, 100))
    def test_a_wait_is_bounded(self, retry: int, jitter: float, left: float) -> None:
        """By max_wait_s and by what is left."""
        retries = Retries(10_000, jitter=lambda: jitter)
        failure = OverloadedError("busy")
        try:
            wait_s = retries.wait_s(failure, retry, Deadline(left, lambda: 0.0))
        except OverloadedError:
            return
        assert 0 <= wait_s < left
        assert wait_s <= retries.max_wait_s

    def test_each_phase_gets_what_is_left(self, time: Time) -> None:
        """The limits of one attempt can't add up to more than the deadline."""
        limits = PhaseLimits(Deadline(10.0, time.clock), 5.0, 60.0)
        assert (limits.get("connect"), limits.get("read")) == (5.0, 10.0)
        time.now += 7
        assert (limits.get("connect"), limits.get("read"), limits.get("write")) == (3.0, 3.0, 3.0)
        time.now += 7
        assert limits.get("read") == 0.001
        assert PhaseLimits(Deadline(None, time.clock), 5.0, 60.0).get("read") == 60.0


class TestOtherCalls:
    def test_ready(self, make: Make, service: Service, time: Time) -> None:
        """Asked once: a 503 or nobody there is a no, anything else an error."""
        client = make()
        service.script = [
            httpx.Response(200, json={"status": "ready"}),
            error(503, "not_ready", **{"Retry-After": "1"}),
            httpx.ConnectError("refused"),
            error(401, "unauthorized"),
        ]
        assert [client.ready() for _ in range(3)] == [True, False, False]
        with pytest.raises(AuthenticationError):
            client.ready()
        assert time.sleeps == []

    def test_model_refreshes_the_limits(self, make: Make, service: Service) -> None:
        """After a change of the service's settings, one call makes a client follow."""
        client = make()
        client.classify(["1", "2"], LABELS)
        service.limits["max_texts"] = 1
        assert client.model()["limits"]["max_texts"] == 1
        client.classify(["1", "2"], LABELS)
        assert [body["texts"] for body in service.bodies[:1]] == [["1", "2"]]
        assert sorted(body["texts"] for body in service.bodies[1:]) == [["1"], ["2"]]

    def test_label_sets(self, make: Make, service: Service) -> None:
        """Posted, looked up and forgotten; posting and forgetting are retried as well."""
        report = {"id": "1" * 32, "name": "n", "labels": 2, "descriptions": 3, "labels_cached": 0, "warnings": []}
        labels = ["a", {"name": "b", "description": ["c", "d"]}]
        busy = error(503, "not_ready", **{"Retry-After": "1"})
        service.script = [
            *(busy, httpx.Response(201, json=report), httpx.Response(200, json=report)),
            httpx.Response(200, json={"id": "1" * 32, "name": "n", "labels": labels}),
            *(busy, httpx.Response(204)),
        ]
        client = make()
        added = [client.add_label_set(labels, name="n"), client.add_label_set(labels)]
        assert [(a.id, a.new, a.labels, a.descriptions) for a in added] == [("1" * 32, n, 2, 3) for n in (True, False)]
        assert json.loads(service.requests[0].content) == {"labels": labels, "name": "n"}
        kept = client.label_set("1" * 32)
        assert (kept.id, kept.name, kept.labels) == ("1" * 32, "n", LabelSet.of(labels))
        assert client.delete_label_set("a/../b") is None
        assert [(r.method, r.url.raw_path) for r in service.requests[4:]] == [
            ("DELETE", b"/v1/label-sets/a%2F..%2Fb")
        ] * 2


def lines(*values: Any, end: str = "\n") -> bytes:
    """NDJSON."""
    return ("\n".join(json.dumps(v, ensure_ascii=False) for v in values) + end).encode()


def ndjson(*values: Any, end: str = "\n") -> httpx.Response:
    """A streamed answer that arrives in small pieces."""
    content = lines(*values, end=end)
    return httpx.Response(
        200, content=content, headers={"content-type": "application/x-ndjson; charset=utf-8", "x-request-id": "r1"}
    )


LAST = {"usage": USAGE, "warnings": [{"loc": ["texts", 0], "type": "t", "message": "m"}], "model": MODEL}


def indexed(index: int, text: str) -> dict[str, Any]:
    return {"index": index, **result(text)}


class TestStreams:
    def test_results_come_with_the_callers_index(self, make: Make, service: Service) -> None:
        """In whatever order the service has them, over several requests; the rest is known at the end."""
        info = httpx.Response(200, json={**MODEL, "limits": LIMITS})
        service.script = [
            info,
            ndjson(indexed(1, "22"), indexed(0, "1"), LAST),
            ndjson(indexed(0, "333"), LAST, end=""),
        ]
        items, stream = make().stream(["1", "22", "333"], LABELS, return_logits=True)
        assert [(i, r["scores"]["a"]) for i, r in items] == [(1, 1 / 3), (0, 1 / 2), (2, 1 / 4)]
        assert service.requests[1].headers["accept"] == "application/x-ndjson"
        assert [body["texts"] for body in service.bodies] == [["1", "22"], ["333"]]
        assert [w["loc"] for w in stream.warnings] == [["texts", 0], ["texts", 2]]
        assert stream.usage == {"text_tokens": 6, "labels": 2, "labels_cached": 1}
        assert stream.model == MODEL

    def test_a_service_that_does_not_stream(self, make: Make) -> None:
        """Its answer in one piece is as good."""
        items, stream = make().stream(["1", "22", "333"], LABELS)
        assert [(i, r["scores"]["a"]) for i, r in items] == [(0, 1 / 2), (1, 1 / 3), (2, 1 / 4)]
        assert stream.model == MODEL

    def test_before_its_end_nothing_shared_is_known(self, service: Service) -> None:
        """Reading it early is an error, not a half truth."""
        service.script = [ndjson(indexed(0, "1"), LAST)]
        with (
            TokenAlignClient("http://s", transport=httpx.MockTransport(service)) as client,
            client.classify_stream("1", LABELS) as stream,
        ):
            assert next(stream)[0] == 0
            with pytest.raises(RuntimeError, match="read all results first"):
                _ = stream.usage
            assert list(stream) == []
            assert stream.usage == USAGE

    def test_the_begin_is_retried(self, make: Make, service: Service, time: Time) -> None:
        """Until it began, a stream is a request like any other."""
        service.script = [error(429, "overloaded"), ndjson(indexed(0, "1"), LAST)]
        items, _ = make().stream(["1"], LABELS)
        assert len(items) == 1
        assert len(time.sleeps) == 1

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ([indexed(0, "1")], "ended after 1 of 2 results and without its last line"),
            ([indexed(0, "1"), LAST], "ended after 1 of 2 results;"),
            ([indexed(0, "1"), indexed(0, "1")], "text 0, which is none"),
            ([indexed(2, "1")], "text 2, which is none"),
            ([indexed(True, "1")], "text True, which is none"),
            ([LAST, indexed(0, "1")], "goes on after its last line"),
            ([{"surprise": 1}], "warnings is missing"),
        ],
    )
    def test_a_stream_that_is_none(self, make: Make, service: Service, values: list[Any], words: str) -> None:
        """Each text gets one result and the last line comes, or it is an error."""
        service.script = [httpx.Response(200, json={**MODEL, "limits": LIMITS}), ndjson(*values)]
        with pytest.raises(InvalidAnswerError, match=words):
            make().stream(["1", "2"], LABELS)

    def test_a_half_line(self, make: Make, service: Service) -> None:
        """What broke off in the middle is no JSON."""
        whole = lines(indexed(0, "1"))
        service.script = [httpx.Response(200, content=whole[:-9], headers={"content-type": "application/x-ndjson"})]
        with pytest.raises(InvalidAnswerError, match="no JSON"):
            make().stream(["1"], LABELS)

    def test_an_error_in_the_middle(self, make: Make, service: Service) -> None:
        """It is the error that it would have been as an answer, its place moved to the caller's."""
        info = httpx.Response(200, json={**MODEL, "limits": LIMITS})
        bad = {"error": "texts[1]: is wrong", "error_type": "invalid_input", "loc": ["texts", 1]}
        service.script = [info, ndjson(indexed(0, "1"), indexed(1, "2"), LAST), ndjson(indexed(0, "3"), bad)]
        with pytest.raises(InputError, match=r"^texts\[3\]: is wrong$"):
            make().stream(["1", "2", "3", "4"], LABELS)
        late = {"error": "too slow", "error_type": "deadline_exceeded", "loc": []}
        service.script = [ndjson(indexed(0, "3"), late)]
        with pytest.raises(ServiceDeadlineError, match=r"504: too slow \(request r1\)"):
            make().stream(["1"], LABELS)

    @given(texts=st.lists(st.text(), max_size=5), cuts=st.lists(st.integers(0, 400), max_size=9))
    def test_lines_are_cut_at_line_feeds_alone(self, texts: list[str], cuts: list[int]) -> None:
        """Wherever the pieces of the stream end, and whatever else Unicode calls a line's end."""
        values = [{"text": text + "\u2028\x85"} for text in texts]
        data = lines(*values) if values else b""
        edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
        found = Lines()
        got = [line for a, b in pairwise(edges) for line in found.feed(data[a:b])]
        assert [json.loads(line) for line in [*got, *found.end()]] == values


class FakeService:
    """The application's inner service: gives each text its own length as the score."""

    def check_room(self) -> None:
        """There is always some."""

    async def classify(self, query: ClassifyQuery) -> dict[str, Any]:
        return answer(*query.texts)

    async def classify_stream(self, query: ClassifyQuery) -> AsyncGenerator[dict[str, Any], None]:
        whole = answer(*query.texts)
        for i, result in enumerate(whole.pop("results")):
            yield {"index": i, **result}
        yield whole

    async def add_label_set(
        self, labels: LabelSet, name: str | None, *, tenant: str | None = None
    ) -> tuple[dict[str, Any], bool]:
        set_id = Definition.of(labels, name).set_id
        counts = {"labels": len(labels), "descriptions": len(labels.descriptions), "labels_cached": 0}
        return {"id": set_id, "name": name, **counts, "warnings": []}, True

    async def label_set(self, set_id: str, *, tenant: str | None = None) -> Definition:
        raise UnknownLabelSetError(set_id)

    async def delete_label_set(self, set_id: str, *, tenant: str | None = None) -> None:
        return None

    async def ready(self) -> None:
        return None

    def model_info(self) -> dict[str, Any]:
        return {**MODEL, "limits": LimitSettings(max_texts=2, max_body_bytes=1_024).model_dump()}


class TestAgainstTheRoutes:
    """The application's own HTTP layer, in this process."""

    async def test_everything_works(self) -> None:
        """The client's requests are what the routes take, and their answers and errors are what it reads."""
        limits = LimitSettings(max_texts=2, max_body_bytes=1_024)
        transport = httpx.ASGITransport(build_http_app(FakeService(), limits))  # type: ignore[arg-type]
        async with AsyncTokenAlignClient("http://service", transport=transport) as client:
            assert await client.ready()
            assert (await client.model())["name"] == "tiny"
            found = await client(["1", "22", "333"], ["a", Label("b", ("c", "d"))], explain="all", return_logits=True)
            assert [r["scores"]["a"] for r in found] == [1 / 2, 1 / 3, 1 / 4]
            assert (await client.add_label_set(LABELS, name="n")).new
            with pytest.raises(NotFoundError) as unknown:
                await client.classify("x", label_set="0" * 32)
            assert (unknown.value.error_type, unknown.value.loc) == ("unknown_label_set", ("label_set",))
            assert await client.delete_label_set("0" * 32) is None
            with pytest.raises(InputError) as wrong:
                await client.classify(["1", "2", "3", "\ud800"], LABELS)
            assert str(wrong.value).startswith("texts[3]: has a lone surrogate U+D800")
            with pytest.raises(RequestTooLargeError):
                await client.classify("x" * 2_000, LABELS)
            stream = client.classify_stream(["1", "22", "333"], LABELS)
            assert [i async for i, _ in stream] == [0, 1, 2]


class TestAsynchronous:
    async def test_parts_go_a_few_at_a_time(self) -> None:
        """As many as max_concurrency, and the answers keep the order."""
        running, most, held = 0, 0, asyncio.Event()

        async def handle(request: httpx.Request) -> httpx.Response:
            nonlocal running, most
            if request.url.path == "/v1/model":
                return httpx.Response(200, json={**MODEL, "limits": LIMITS | {"max_texts": 1}})
            running += 1
            most = max(most, running)
            if running == 3:
                held.set()
            await held.wait()
            running -= 1
            return httpx.Response(200, json=answer(*json.loads(request.content)["texts"]))

        transport = httpx.MockTransport(handle)
        async with AsyncTokenAlignClient("http://s", transport=transport, max_concurrency=3) as client:
            texts = ["x" * n for n in range(1, 9)]
            found = await client.classify(texts, LABELS)
        assert most == 3
        assert [r["scores"]["a"] for r in found] == [1 / (1 + len(t)) for t in texts]

    async def test_a_failure_ends_the_other_parts(self) -> None:
        """Nothing of a call goes on behind its caller's back."""
        cancelled: list[str] = []
        waiting = asyncio.Event()

        async def handle(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/model":
                return httpx.Response(200, json={**MODEL, "limits": LIMITS | {"max_texts": 1}})
            [text] = json.loads(request.content)["texts"]
            if text == "bad":
                await waiting.wait()
                return error(500, "internal")
            waiting.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(text)
                raise
            raise AssertionError

        async with AsyncTokenAlignClient("http://s", transport=httpx.MockTransport(handle)) as client:
            with pytest.raises(ServiceError):
                await client.classify(["bad", "good"], LABELS)
        assert cancelled == ["good"]

    async def test_the_deadline_ends_a_request_that_hangs(self) -> None:
        """Also one whose transport knows no limits."""

        async def hang(request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

        async with AsyncTokenAlignClient("http://s", transport=httpx.MockTransport(hang), timeout_s=0.01) as client:
            with pytest.raises(ServiceTimeoutError, match=r"no answer within 0.01 s \(timeout_s\)"):
                await client.classify("x", LABELS)

    def test_max_concurrency_is_checked(self) -> None:
        """As the other arguments are."""
        with pytest.raises(ConfigError, match="max_concurrency"):
            AsyncTokenAlignClient("http://s", max_concurrency=0)


class Handler(BaseHTTPRequestHandler):
    """A real server on a loopback port, which notes the port that each request came from."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.peers.append(self.client_address[1])
        if body["text"] == "silence":
            self.server.released.wait(60)
            return
        data = json.dumps(answer(body["text"])).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    """A running `Handler`."""
    found: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.peers, found.released, found.daemon_threads = [], threading.Event(), True
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.released.set()
    found.shutdown()
    thread.join()
    found.server_close()


class TestOverTheNetwork:
    """Sockets, not a mock."""

    def test_a_connection_is_used_again(self, server: Any) -> None:
        """Calls one after the other share one."""
        transport = httpx.HTTPTransport()
        with TokenAlignClient(f"http://127.0.0.1:{server.server_port}", transport=transport) as client:
            for _ in range(3):
                client.classify("x", LABELS)
        assert len(set(server.peers)) == 1
        assert len(server.peers) == 3

    def test_a_silent_server_is_given_up(self, server: Any) -> None:
        """After the call's own limit, though the limit for reading is longer."""
        url, transport = f"http://127.0.0.1:{server.server_port}", httpx.HTTPTransport()
        with (
            TokenAlignClient(url, transport=transport, timeout_s=0.2, read_timeout_s=60.0) as client,
            pytest.raises(ServiceTimeoutError),
        ):
            client.classify("silence", LABELS)
        assert len(server.peers) == 1

    def test_nobody_listens(self, server: Any) -> None:
        """An error with the address, without the password that it may hold."""
        url, transport = "http://user:hidden@127.0.0.1:9", httpx.HTTPTransport()
        with (
            TokenAlignClient(url, transport=transport, max_retries=0) as client,
            pytest.raises(ServiceConnectionError, match=r"no answer from http://127.0.0.1:9: ") as raised,
        ):
            client.classify("x", LABELS)
        assert "hidden" not in str(raised.value)

    def test_threads_share_a_client(self, server: Any) -> None:
        """Each gets the answer to its own text."""
        transport = httpx.HTTPTransport()
        found: dict[int, float] = {}
        with TokenAlignClient(f"http://127.0.0.1:{server.server_port}", transport=transport) as client:

            def ask(n: int) -> None:
                found[n] = client.classify("x" * n, LABELS)["scores"]["a"]

            threads = [threading.Thread(target=ask, args=(n,)) for n in range(1, 13)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert found == {n: 1 / (1 + n) for n in range(1, 13)}


def test_a_given_http_client_stays_open(service: Service) -> None:
    """It is the caller's."""
    with httpx.Client(transport=httpx.MockTransport(service)) as own:
        with TokenAlignClient("http://s", http_client=own) as client:
            client.classify("x", LABELS)
        assert not own.is_closed
    with TokenAlignClient("http://s", transport=httpx.MockTransport(service)) as client:
        client.classify("x", LABELS)
    with pytest.raises(RuntimeError):
        client.classify("x", LABELS)


def test_the_client_needs_no_model_library() -> None:
    """Importing it loads neither torch nor transformers, nor anything of the service."""
    code = "import sys, tokenalign.client\nprint(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "httpx" in loaded
    assert loaded & {"torch", "transformers", "ray", "redis", "fastapi", "deploy", "huggingface_hub"} == set()


def test_without_httpx_the_error_names_the_extra() -> None:
    """It says what to install."""
    code = "import sys\nsys.modules['httpx'] = None\nimport tokenalign.client"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'tokenalign[client]'" in done.stderr
