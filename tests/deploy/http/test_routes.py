"""The routes over a service that does what a test wants: statuses, shapes, documentation."""

import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest

from deploy.batching import QueueFull
from deploy.http.errors import NotReadyError
from deploy.http.routes import build_http_app
from deploy.http.schemas import ClassifyQuery
from deploy.label_sets import Definition
from deploy.settings import LimitSettings
from tokenalign import LabelSet
from tokenalign.errors import InputError, NumericalError

LIMITS = LimitSettings(max_texts=3, max_body_bytes=1_024)
DIALECTS = ("/hf", "/predict", "/rerank", "/v1/rerank", "/v2")  # have tests, and errors, of their own
GOOD = {"text": "card", "labels": ["a", "b"]}


class FakeService:
    """Gives `answer`, or raises it; keeps the queries."""

    def __init__(self) -> None:
        self.answer: Any = {"results": []}
        self.queries: list[ClassifyQuery] = []
        self.full: QueueFull | None = None

    def _give(self) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def check_room(self) -> None:
        if self.full is not None:
            raise self.full

    async def classify(self, query: ClassifyQuery) -> dict[str, Any]:
        self.queries.append(query)
        given: dict[str, Any] = self._give()
        return given

    async def classify_stream(self, query: ClassifyQuery) -> AsyncGenerator[dict[str, Any], None]:
        self.queries.append(query)
        yield self._give()

    async def add_label_set(
        self, labels: LabelSet, name: str | None, *, tenant: str | None = None
    ) -> tuple[dict[str, Any], bool]:
        self._give()
        return {"id": Definition.of(labels, name).set_id}, True

    def logit_scale(self, model: str) -> float:
        return 1.0

    def predict_label_set(self) -> str | None:
        return None

    async def label_set(self, set_id: str, *, tenant: str | None = None) -> Definition:
        given: Definition = self._give()
        return given

    async def delete_label_set(self, set_id: str, *, tenant: str | None = None) -> None:
        self._give()

    async def ready(self) -> None:
        self._give()

    def models_info(self) -> dict[str, Any]:
        given: dict[str, Any] = self._give()
        return given

    def model_info(self) -> dict[str, Any]:
        given: dict[str, Any] = self._give()
        return given


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the routes over the fake service; an exception that leaves the application fails the test."""
    transport = httpx.ASGITransport(build_http_app(service, LIMITS))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as opened:
        yield opened


def error_of(response: httpx.Response, status: int, error_type: str) -> dict[str, Any]:
    """The error's body, of the one shape that errors have."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()
    assert error.keys() == {"error", "error_type", "loc", "request_id"}
    assert error["request_id"] == response.headers["X-Request-ID"]
    assert error["error_type"] == error_type
    assert error["error"]
    assert isinstance(error["loc"], list)
    return error


class TestClassify:
    async def test_a_good_request(self, client: httpx.AsyncClient, service: FakeService) -> None:
        """The service gets the checked query, and its answer goes out as JSON with characters as they are."""
        service.answer = {"results": [{"label": "é 日本 👍"}]}
        response = await client.post("/v1/classify", json=GOOD)
        assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
        assert response.json() == service.answer
        assert "é 日本 👍".encode() in response.content
        [query] = service.queries
        assert (query.texts, query.labels.names) == (("card",), ("a", "b"))

    async def test_the_content_type_is_not_looked_at(self, client: httpx.AsyncClient) -> None:
        """A body is JSON whatever it is called, as curl's -d calls it a form."""
        response = await client.post(
            "/v1/classify", content=json.dumps(GOOD), headers={"content-type": "application/x-www-form-urlencoded"}
        )
        assert response.status_code == 200

    async def test_a_bad_request_never_reaches_the_service(
        self, client: httpx.AsyncClient, service: FakeService
    ) -> None:
        """A refusal carries its place and the service isn't asked."""
        response = await client.post("/v1/classify", json=GOOD | {"top_k": 0})
        assert error_of(response, 422, "invalid_input")["loc"] == ["top_k"]
        assert error_of(await client.post("/v1/classify", content=b"{"), 422, "invalid_input")["loc"] == []
        assert service.queries == []

    async def test_a_body_over_the_limit(self, client: httpx.AsyncClient, service: FakeService) -> None:
        """413 with the limit, its setting and a remedy."""
        response = await client.post("/v1/classify", json=GOOD | {"text": "x" * 2_000})
        message = error_of(response, 413, "body_too_large")["error"]
        assert re.search(r"has 2,\d+ bytes, at most 1,024 allowed \(limits.max_body_bytes\); send fewer texts", message)
        assert service.queries == []

    async def test_a_streamed_body_over_the_limit(self, client: httpx.AsyncClient) -> None:
        """A body that doesn't say its length is cut off where it passes the limit."""
        sent = 0

        async def chunks() -> AsyncIterator[bytes]:
            nonlocal sent
            while True:
                sent += 1
                yield b" " * 512

        error_of(await client.post("/v1/classify", content=chunks()), 413, "body_too_large")
        assert sent == 3

    async def test_an_error_that_nobody_foresaw(
        self, client: httpx.AsyncClient, service: FakeService, caplog: pytest.LogCaptureFixture
    ) -> None:
        """500 without a word of the inside; the log has all of it."""
        service.answer = ZeroDivisionError("private")
        with caplog.at_level(logging.ERROR, logger="deploy"):
            error = error_of(await client.post("/v1/classify", json=GOOD), 500, "internal")
        assert "private" not in json.dumps(error)
        [record] = caplog.records
        assert record.exc_info is not None
        assert record.exc_info[1] is service.answer

    async def test_a_callers_mistake_is_no_log_line(
        self, client: httpx.AsyncClient, service: FakeService, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What the caller did wrong is told the caller alone."""
        service.answer = InputError("no", ("text",))
        error_of(await client.post("/v1/classify", json=GOOD), 422, "invalid_input")
        assert not caplog.records

    async def test_numbers_that_are_no_json(self, client: httpx.AsyncClient, service: FakeService) -> None:
        """NaN and infinity never go out: where a score would be one, that is an error of its own."""
        service.answer = NumericalError("NaN")
        error_of(await client.post("/v1/classify", json=GOOD), 500, "numerical")

    async def test_a_caller_who_leaves(self, service: FakeService) -> None:
        """A connection that ends in the middle of the body ends the request, quietly."""
        sent = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/classify", "headers": [], "query_string": b""}
        await build_http_app(service, LIMITS)(scope, receive, send)
        assert service.queries == []
        assert sent[0]["status"] == 499


class TestOtherRoutes:
    async def test_live(self, client: httpx.AsyncClient, service: FakeService) -> None:
        """The process is live whatever the service says."""
        service.answer = NotReadyError("starting")
        assert (await client.get("/health/live")).json() == {"status": "live"}

    async def test_ready(self, client: httpx.AsyncClient, service: FakeService) -> None:
        """200 when the service is ready, else 503 with when to ask again."""
        assert (await client.get("/health/ready")).json() == {"status": "ready"}
        service.answer = NotReadyError("starting")
        response = await client.get("/health/ready")
        assert error_of(response, 503, "not_ready")["error"] == "starting"
        assert response.headers["retry-after"] == "1"

    async def test_model(self, client: httpx.AsyncClient, service: FakeService) -> None:
        """What the service tells of itself, or 503 before it knows."""
        service.answer = {"name": "some"}
        assert (await client.get("/v1/model")).json() == {"name": "some"}
        service.answer = NotReadyError("starting")
        error_of(await client.get("/v1/model"), 503, "not_ready")

    @pytest.mark.parametrize("path", ["/v1/classfy", "/v1", "/nothing/here", "/static-offline-docs/nothing.js"])
    async def test_nothing_there(self, client: httpx.AsyncClient, path: str) -> None:
        """404 in the shape of all errors, with the paths that there are."""
        assert "POST /v1/classify" in error_of(await client.get(path), 404, "not_found")["error"]

    @pytest.mark.parametrize(
        ("method", "path"), [("GET", "/v1/classify"), ("PUT", "/v1/classify"), ("POST", "/v1/model"), ("POST", "/docs")]
    )
    async def test_another_method(self, client: httpx.AsyncClient, method: str, path: str) -> None:
        """405 in the shape of all errors, with the methods that are allowed."""
        response = await client.request(method, path)
        assert method in error_of(response, 405, "method_not_allowed")["error"]
        assert "allow" in response.headers

    async def test_the_paths_that_an_error_names_exist(self, client: httpx.AsyncClient) -> None:
        """Each path that a 404 offers answers something else."""
        message = error_of(await client.get("/nothing"), 404, "not_found")["error"]
        offered = re.findall(r"(GET|POST) (/[\w/-]+)", message)
        assert len(offered) == 7
        for method, path in offered:
            body = {"labels": ["a", "b"]} if path == "/v1/label-sets" else GOOD
            assert (await client.request(method, path, json=body)).status_code in (200, 201)


@pytest.fixture
async def openapi(client: httpx.AsyncClient) -> dict[str, Any]:
    """The OpenAPI document."""
    document: dict[str, Any] = (await client.get("/openapi.json")).json()
    return document


def check(openapi: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Raise unless `value` is what a schema of the document says."""
    jsonschema.Draft202012Validator({**schema, "components": openapi["components"]}).validate(value)


def answer_schema(openapi: dict[str, Any], path: str, method: str, status: int) -> dict[str, Any]:
    schema: dict[str, Any] = openapi["paths"][path][method]["responses"][str(status)]["content"]["application/json"][
        "schema"
    ]
    return schema


class TestOpenApi:
    def test_it_is_complete(self, openapi: dict[str, Any]) -> None:
        """Every path, every status that it can answer with, and schemas that are themselves valid."""
        assert openapi["openapi"].startswith("3.1")
        statuses = {
            f"{method} {path}": set(operation["responses"])
            for path, operations in openapi["paths"].items()
            for method, operation in operations.items()
            if not path.startswith(DIALECTS)
        }
        assert statuses == {
            "post /v1/classify": {"200", "404", "408", "413", "422", "429", "500", "503", "504"},
            "post /v1/label-sets": {"200", "201", "408", "413", "422", "500", "503", "504"},
            "get /v1/label-sets/{set_id}": {"200", "404", "500", "503"},
            "delete /v1/label-sets/{set_id}": {"204", "409", "500", "503"},
            "get /v1/model": {"200", "503"},
            "get /v1/models": {"200", "503"},
            "get /health/live": {"200"},
            "get /health/ready": {"200", "503"},
        }
        for schema in openapi["components"]["schemas"].values():
            jsonschema.Draft202012Validator.check_schema(schema)
        references = re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(openapi))
        assert set(references) <= set(openapi["components"]["schemas"])

    @pytest.mark.parametrize(
        ("body", "good"),
        [
            (GOOD, True),
            ({"texts": ["a"], "labels": ["a", {"name": "b", "description": ["c", "d"]}], "explain": "all"}, True),
            ({**GOOD, "explain": True, "return_logits": True, "top_k": 1}, True),
            ({**GOOD, "top_k": None}, True),
            ({**GOOD, "explain": "yes"}, False),
            ({**GOOD, "top_k": 0}, False),
            ({**GOOD, "return_logits": 1}, False),
            ({**GOOD, "more": 1}, False),
            ({"text": 3, "labels": ["a", "b"]}, False),
            ({"texts": [], "labels": ["a", "b"]}, False),
            ({"text": "a", "labels": [{"description": "b"}]}, False),
            ({"text": "a"}, False),
            ({"text": "a", "label_set": "x"}, False),
            ({**GOOD, "label_set": "0" * 32}, False),
        ],
    )
    async def test_the_request_schema_is_what_is_accepted(
        self, client: httpx.AsyncClient, openapi: dict[str, Any], body: dict[str, Any], good: bool
    ) -> None:
        """A body that fits the documented schema is taken, and one that doesn't is refused."""
        request = openapi["paths"]["/v1/classify"]["post"]["requestBody"]
        assert request["required"] is True
        schema = request["content"]["application/json"]["schema"]
        jsonschema.Draft202012Validator.check_schema(schema)
        if good:
            check(openapi, schema, body)
        else:
            with pytest.raises(jsonschema.ValidationError):
                check(openapi, schema, body)
        assert (await client.post("/v1/classify", json=body)).status_code == (200 if good else 422)

    async def test_real_answers_fit_their_schemas(self, run_stack: Callable[..., Any], bert: Any) -> None:
        """What the whole application answers, warnings and everything that can be asked for, is as documented."""
        async with run_stack(bert, limits={"max_body_bytes": 4_096}) as stack:
            openapi = (await stack.client.get("/openapi.json")).json()
            good = answer_schema(openapi, "/v1/classify", "post", 200)
            labels = ["a", "日本", "本日", {"name": "b", "description": "card " * 200}]
            for options in ({}, {"explain": "all", "return_logits": True, "top_k": 2}):
                answer = await stack.ask(texts=["card", "cash " * 200], labels=labels, **options)
                check(openapi, good, answer)
                assert {warning["type"] for warning in answer["warnings"]} == {"truncated", "indistinguishable"}
            response = await stack.post(text="", labels=labels)
            check(openapi, answer_schema(openapi, "/v1/classify", "post", 422), response.json())
            response = await stack.post(text="x" * 5_000, labels=labels)
            check(openapi, answer_schema(openapi, "/v1/classify", "post", 413), response.json())

    def test_the_error_schema(self, openapi: dict[str, Any]) -> None:
        """Each error status is documented with the one shape of errors."""
        for path, operations in openapi["paths"].items():
            if path.startswith(DIALECTS):
                continue
            for method, operation in operations.items():
                for status in set(operation["responses"]) - {"200", "201", "204"}:
                    assert answer_schema(openapi, path, method, int(status))["$ref"].endswith("/ErrorResponse")


class TestDocs:
    async def test_pages_need_no_other_host(self, client: httpx.AsyncClient) -> None:
        """The API's page and everything that it loads come from us."""
        page = await client.get("/docs")
        assert page.status_code == 200
        loaded = re.findall(r"""(?:src|href|url)\s*[=:]\s*['"]([^'"]+)['"]""", page.text)
        assert len(loaded) >= 4  # script, style, icon and the OpenAPI document
        for address in loaded:
            full = urljoin("http://test/docs", address)
            assert urlsplit(full).netloc == "test"
            response = await client.get(full)
            assert response.status_code == 200
            assert response.content
        assert "//" not in re.sub(r"//test", "", page.text.replace("<!--", "")).replace("// ", "")

    async def test_no_page_that_loads_from_elsewhere(self, client: httpx.AsyncClient) -> None:
        """ReDoc's page shows a picture from its maker's host, so it isn't served."""
        error_of(await client.get("/redoc"), 404, "not_found")
