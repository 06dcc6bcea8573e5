"""What holds for every dialect: documented as it behaves, bounded, apart by tenant, no 500 whatever is sent."""

import asyncio
import json
import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.batching import DeadlineExceeded, QueueFull
from deploy.http.errors import NotReadyError
from deploy.http.routes import build_http_app
from deploy.http.tenants import Tenants
from deploy.label_sets import Definition
from deploy.settings import LimitSettings
from tokenalign import LabelSet
from tokenalign.errors import FingerprintMismatchError

LIMITS = LimitSettings(max_texts=4, max_labels=6, max_text_chars=200, max_body_bytes=8_192)
PREDICTED = Definition.of(LabelSet.of(["first", "second"]), None).set_id

# A good body of each route with everything in it that a mutation may touch.
BODIES: dict[str, dict[str, Any]] = {
    "/hf/zero-shot-classification": {
        "inputs": ["card", "cash"],
        "parameters": {"candidate_labels": ["a", "b"], "multi_label": False, "hypothesis_template": "on {}."},
        "options": {"wait_for_model": True},
    },
    "/predict": {"inputs": [["card"], ["cash"]], "raw_scores": True, "truncate": True, "truncation_direction": "Right"},
    "/rerank": {"query": "a", "texts": ["card", "cash"], "raw_scores": False, "return_text": True, "truncate": False},
    "/v1/rerank": {
        "model": "echo",
        "query": "a",
        "documents": ["card", {"text": "cash"}],
        "top_n": 1,
        "return_documents": True,
        "rank_fields": ["text"],
        "max_chunks_per_doc": 1,
    },
    "/v2/rerank": {"model": "m", "query": "a", "documents": ["card", "cash"], "max_tokens_per_doc": 9, "priority": 0},
    "/v2/models/echo/infer": {
        "id": "1",
        "parameters": {"multi_label": False, "min_score": 0.2, "binary_data_output": False},
        "inputs": [
            {"name": "text", "shape": [2, 1], "datatype": "BYTES", "data": [["card"], ["cash"]]},
            {"name": "labels", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]},
        ],
        "outputs": [{"name": "scores", "parameters": {"binary_data": True}}, {"name": "label"}],
    },
}
PATHS = [pytest.param(path, id=path) for path in BODIES]
SHAPES = {
    "/hf/zero-shot-classification": {"error"},
    "/predict": {"error", "error_type"},
    "/rerank": {"error", "error_type"},
    "/v1/rerank": {"message"},
    "/v2/rerank": {"message"},
    "/v2/models/echo/infer": {"error"},
}
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1e308,
    10**400,
    "",
    " ",
    "\x00",
    "\ud800",
    "{}",
    "a" * 300,
    [],
    [[]],
    [None],
    {},
    {"text": 1},
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def places_in(value: Any, start: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to each value within a body."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    return [place for key, inner in items for place in ((*start, key), *places_in(inner, (*start, key)))]


def with_value(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The body with another value at a place."""
    changed: Any = deepcopy(body)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _predicted(service: Any) -> None:
    service.predicted = PREDICTED


@pytest.fixture
def openapi(service: Any) -> dict[str, Any]:
    """The OpenAPI document."""
    return build_http_app(service, LIMITS).openapi()


def operation_of(openapi: dict[str, Any], path: str, method: str = "post") -> dict[str, Any]:
    found: dict[str, Any] = openapi["paths"][path.replace("/echo", "/{name}")][method]
    return found


def valid(openapi: dict[str, Any], schema: dict[str, Any], value: Any) -> bool:
    """Whether a value is what a schema of the document says."""
    checker = jsonschema.Draft202012Validator({**schema, "components": openapi["components"]})
    return bool(checker.is_valid(value))


class TestHostileBodies:
    @pytest.mark.parametrize("path", PATHS)
    async def test_odd_values_everywhere(self, echo: httpx.AsyncClient, path: str) -> None:
        """Any value of a good body, replaced by each of many odd ones, gives an answer or a 422 in the right shape."""
        assert (await echo.post(path, json=BODIES[path])).status_code == 200
        for place in places_in(BODIES[path]):
            for value in ODD:
                response = await echo.post(path, content=json.dumps(with_value(BODIES[path], place, value)))
                assert response.status_code in (200, 422), (place, value, response.text)
                if response.status_code == 422:
                    assert response.json().keys() == SHAPES[path]

    @pytest.mark.parametrize("path", PATHS)
    def test_any_json(self, service: Any, path: str) -> None:
        """Any JSON at any place, and any JSON at all: an answer or a 422."""
        app = build_http_app(service, LIMITS)

        async def post(content: bytes) -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                return await client.post(path, content=content)

        bodies = VALUES | st.builds(with_value, st.just(BODIES[path]), st.sampled_from(places_in(BODIES[path])), VALUES)

        @given(bodies)
        def check(body: Any) -> None:
            response = asyncio.run(post(json.dumps(body).encode()))
            assert response.status_code in (200, 422), response.text

        check()

    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"[" * 2_000])
    async def test_no_json(self, echo: httpx.AsyncClient, path: str, content: bytes) -> None:
        """What is no JSON object is a 422 in the shape of the dialect."""
        response = await echo.post(path, content=content)
        assert response.status_code == 422
        assert response.json().keys() == SHAPES[path]

    @pytest.mark.parametrize("path", PATHS)
    async def test_a_body_over_the_limit(self, echo: httpx.AsyncClient, service: Any, path: str) -> None:
        """413 with the limit, in the shape of the dialect."""
        response = await echo.post(path, content=b" " * 8_193)
        assert response.status_code == 413
        assert response.json().keys() == SHAPES[path]
        assert "limits.max_body_bytes" in response.text
        assert service.queries == []


class TestErrors:
    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize(
        ("failure", "status", "retry"),
        [
            (QueueFull(5, 100, 4, 1_000, 2.5), 429, "3"),
            (NotReadyError("the service is starting"), 503, "1"),
            (FingerprintMismatchError("rows", "a", "b"), 503, "1"),
            (DeadlineExceeded("no answer within 30 s"), 504, None),
            (ZeroDivisionError("private"), 500, None),
        ],
    )
    async def test_statuses_are_the_native_ones(
        self, echo: httpx.AsyncClient, service: Any, path: str, failure: Any, status: int, retry: str | None
    ) -> None:
        """Status, sentence and Retry-After are those of the native route; only the shape is the dialect's."""
        service.failure = failure
        response = await echo.post(path, json=BODIES[path])
        native = await echo.post("/v1/classify", json={"text": "a", "labels": ["a", "b"]})
        assert response.status_code == native.status_code == status
        assert response.json().keys() == SHAPES[path]
        assert native.json()["error"] in response.json().values()
        assert response.headers.get("retry-after") == native.headers.get("retry-after") == retry
        assert "private" not in response.text

    @pytest.mark.parametrize("path", [*PATHS, "/v1/classify"])
    async def test_a_full_queue_is_said_before_the_body_is_read(
        self, echo: httpx.AsyncClient, service: Any, path: str
    ) -> None:
        """Under overload most requests are refused, so that must cost little: 429 even for what is no JSON."""
        service.full = QueueFull(5, 100, 4, 1_000, 2.5)
        refused = await echo.post(path, content=b"{")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
        service.full = None
        assert (await echo.post(path, content=b"{")).status_code != 429
        assert service.queries == []

    async def test_the_kinds_of_text_embeddings_inference(self, echo: httpx.AsyncClient, service: Any) -> None:
        """Its `error_type` says what to do: mend the request, come back later, or ask who runs it."""
        for failure, kind in (
            (QueueFull(5, 100, 4, 1_000, 2.5), "Overloaded"),
            (NotReadyError("starting"), "Unhealthy"),
            (ZeroDivisionError(), "Backend"),
        ):
            service.failure = failure
            assert (await echo.post("/rerank", json=BODIES["/rerank"])).json()["error_type"] == kind


class TestTenants:
    @pytest.mark.parametrize("path", PATHS)
    async def test_the_key_of_the_caller_counts(self, service: Any, path: str) -> None:
        """Where the settings part callers by their key, a dialect's request is its caller's as a native one is."""
        app = build_http_app(service, LIMITS, Tenants(per_key=True))
        native = {"text": "a", "labels": ["a", "b"]}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            for key in ("Bearer one", "Bearer two"):
                await client.post(path, json=BODIES[path], headers={"authorization": key})
                await client.post("/v1/classify", json=native, headers={"authorization": key})
        tenants = [query.tenant for query in service.queries]
        assert tenants[0] == tenants[1] != tenants[2] == tenants[3]


class TestOpenApi:
    @pytest.mark.parametrize("path", PATHS)
    async def test_the_request_schema_is_what_is_accepted(
        self, echo: httpx.AsyncClient, openapi: dict[str, Any], path: str
    ) -> None:
        """The example works; of many changed bodies, each that is taken fits the documented schema."""
        content = operation_of(openapi, path)["requestBody"]["content"]["application/json"]
        schema = content["schema"]
        jsonschema.Draft202012Validator.check_schema(schema)
        for body in (content["example"], BODIES[path]):
            assert valid(openapi, schema, body)
            assert (await echo.post(path, json=body)).status_code == 200
        for place in places_in(BODIES[path]):
            for value in ODD:
                body = with_value(BODIES[path], place, value)
                if (await echo.post(path, content=json.dumps(body))).status_code == 200:
                    assert valid(openapi, schema, body), (place, value)
        assert not valid(openapi, schema, {**BODIES[path], "more": 1})

    @pytest.mark.parametrize("path", PATHS)
    async def test_answers_are_as_documented(self, echo: httpx.AsyncClient, openapi: dict[str, Any], path: str) -> None:
        """The answer and an error fit the schemas of their statuses."""
        responses = operation_of(openapi, path)["responses"]
        schema = {status: response["content"]["application/json"]["schema"] for status, response in responses.items()}
        example = operation_of(openapi, path)["requestBody"]["content"]["application/json"]["example"]
        for body in (example, BODIES[path]):
            response = await echo.post(path, json=body)
            if response.headers["content-type"] == "application/json":
                assert valid(openapi, schema["200"], response.json())
        assert valid(openapi, schema["422"], (await echo.post(path, json={})).json())
        assert not valid(openapi, schema["200"], {})

    @pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
    async def test_defaults_are_as_documented(
        self, echo: httpx.AsyncClient, openapi: dict[str, Any], path: str
    ) -> None:
        """Whether documents come back unasked differs between two APIs, and the document says so."""
        schema = operation_of(openapi, path)["requestBody"]["content"]["application/json"]["schema"]
        [result] = (await echo.post(path, json={"query": "a", "documents": ["b"]})).json()["results"]
        assert schema["properties"]["return_documents"]["default"] is ("document" in result)

    def test_it_is_complete(self, openapi: dict[str, Any]) -> None:
        """Every route of a dialect, and every status that it can answer with."""
        asked = {"200", "408", "413", "422", "429", "500", "503", "504"}
        found = {
            f"{method} {path}": set(operation["responses"])
            for path, operations in openapi["paths"].items()
            for method, operation in operations.items()
            if path.startswith(("/hf", "/predict", "/rerank", "/v1/rerank", "/v2"))
        }
        assert found == {
            "post /hf/zero-shot-classification": asked,
            "post /predict": asked | {"404"},
            "post /rerank": asked,
            "post /v1/rerank": asked,
            "post /v2/rerank": asked,
            "get /v2": {"200"},
            "get /v2/health/live": {"200"},
            "get /v2/health/ready": {"200", "503"},
            "get /v2/models/{name}": {"200", "404", "503"},
            "get /v2/models/{name}/ready": {"200", "404", "503"},
            "post /v2/models/{name}/infer": asked | {"404"},
        }
        references = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(openapi)))
        assert references <= set(openapi["components"]["schemas"])
        ids = [operation["operationId"] for paths in openapi["paths"].values() for operation in paths.values()]
        assert len(ids) == len(set(ids))


def test_the_mutations_reach_everything() -> None:
    """The paths that the tests above change are all there are."""
    places: Callable[[Any], list[tuple[Any, ...]]] = places_in
    assert places({"a": [1, {"b": 2}], "c": {}}) == [("a",), ("a", 0), ("a", 1), ("a", 1, "b"), ("c",)]
    assert with_value({"a": [1, 2]}, ("a", 1), 3) == {"a": [1, 3]}
