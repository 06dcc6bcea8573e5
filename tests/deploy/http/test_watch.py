"""Every request has an id, a time and a route, whatever becomes of it."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from deploy.http.routes import build_http_app
from deploy.http.watch import Watch
from deploy.metrics import REQUEST_SECONDS
from deploy.request_context import lap
from deploy.settings import LimitSettings
from deploy.telemetry import Metric, NoSink

BODY = {"text": "card", "labels": ["a", "b"]}
NEW_ID = re.compile(r"[0-9a-f]{32}")


class Times(NoSink):
    """Keeps the tags of each request's time."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def observe(self, metric: Metric, value: float, tags: Mapping[str, str]) -> None:
        assert metric is REQUEST_SECONDS
        assert tags.keys() == set(metric.tag_keys)
        assert value > 0
        self.told.append((tags["route"], tags["status"]))


class Service:
    """A service that does what it is told."""

    def __init__(self) -> None:
        self.answer: Any = {"results": []}
        self.asked = asyncio.Event()

    async def classify(self, query: Any) -> Any:
        lap("wait")
        self.asked.set()
        if isinstance(self.answer, asyncio.Event):
            await self.answer.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def check_room(self) -> None:
        """There is always room."""

    def model_info(self) -> Any:
        raise ZeroDivisionError


@pytest.fixture
def times() -> Times:
    return Times()


@pytest.fixture
def watch(times: Times) -> Watch:
    return Watch(times)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def client(service: Any, watch: Watch) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that is watched."""
    app = build_http_app(service, LimitSettings(), watch=watch)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as opened:
        yield opened


class TestIds:
    @pytest.mark.parametrize("given", ["7", "Root=1-67891233-abcdef", "x" * 128, 'quo"ted\\{}'])
    async def test_a_callers_id_is_kept(self, client: httpx.AsyncClient, given: str) -> None:
        """It comes back in the header, and in an error's body."""
        response = await client.post("/v1/classify", json={}, headers={"x-request-id": given})
        assert response.headers.get_list("X-Request-ID") == [given]
        assert response.json()["request_id"] == given

    @pytest.mark.parametrize("given", [None, "", "x" * 129, "two words", "umläut", "tab\there"])
    async def test_others_get_one(self, client: httpx.AsyncClient, given: str | None) -> None:
        """Who gives none, or one that is too long or not of printable characters, gets a new one."""
        headers = {} if given is None else {"x-request-id": given.encode()}
        responses = [await client.post("/v1/classify", json={}, headers=headers) for _ in range(2)]
        ids = [response.headers["X-Request-ID"] for response in responses]
        assert all(NEW_ID.fullmatch(found) for found in ids)
        assert ids[0] != ids[1]
        assert [response.json()["request_id"] for response in responses] == ids

    async def test_good_answers_have_it_in_the_header(self, client: httpx.AsyncClient) -> None:
        """A 200's body is the answer alone."""
        response = await client.post("/v1/classify", json=BODY, headers={"x-request-id": "7"})
        assert (response.json(), response.headers["X-Request-ID"]) == ({"results": []}, "7")

    async def test_behind_a_server_that_names_requests(self, service: Any) -> None:
        """The header is the server's alone, which had put the id into the request; errors have the id that is used."""
        app = build_http_app(service, LimitSettings(), watch=Watch(names_requests=False))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            kept = await client.post("/v1/classify", json={}, headers={"x-request-id": "7"})
            replaced = await client.post("/v1/classify", json={}, headers={"x-request-id": "two words"})
        assert ("X-Request-ID" in kept.headers, kept.json()["request_id"]) == (False, "7")
        assert "X-Request-ID" not in replaced.headers
        assert NEW_ID.fullmatch(replaced.json()["request_id"])

    @pytest.mark.parametrize("path", ["/nothing/here", "/v1/classify"])
    async def test_errors_of_the_router_have_it(self, client: httpx.AsyncClient, path: str) -> None:
        """404 and 405 as well."""
        response = await client.get(path, headers={"x-request-id": "7"})
        assert response.json()["request_id"] == "7"


class TestTimes:
    async def test_by_route_and_status(
        self, client: httpx.AsyncClient, service: Service, times: Times, watch: Watch
    ) -> None:
        """Each request is told once; a 500 too, and what callers make up has one name for all."""
        await client.post("/v1/classify", json=BODY)
        await client.post("/v1/classify", json={})
        service.answer = RuntimeError()
        await client.post("/v1/classify", json=BODY)
        for path in ("/a", "/b?c", "/v1/label-sets/0/x"):
            await client.get(path)
        await client.get("/v2/models/none/ready")
        assert times.told == [
            ("/v1/classify", "200"),
            ("/v1/classify", "422"),
            ("/v1/classify", "500"),
            *[("other", "404")] * 3,
            ("/v2/models/{name:path}/ready", "500"),
        ]
        assert watch.in_progress == 0

    async def test_a_caller_who_leaves(
        self, client: httpx.AsyncClient, service: Service, times: Times, watch: Watch
    ) -> None:
        """Counts as 499, and is in progress no longer."""
        service.answer = asyncio.Event()
        request = asyncio.create_task(client.post("/v1/classify", json=BODY))
        await service.asked.wait()
        assert watch.in_progress == 1
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert times.told == [("/v1/classify", "499")]
        assert watch.in_progress == 0

    async def test_stages_are_added_up(self, client: httpx.AsyncClient, watch: Watch) -> None:
        """Each stage that a request went through has a time and a count."""
        for _ in range(2):
            await client.post("/v1/classify", json=BODY)
        await client.post("/v1/classify", content=b"{")
        await client.get("/health/live")  # goes through none
        runs = {r.tags[0]: r.value for r in watch.readings() if r.metric.name.endswith("stage_runs_total")}
        seconds = {r.tags[0]: r.value for r in watch.readings() if r.metric.name.endswith("stage_seconds_total")}
        assert runs == {"read": 3, "parse": 2, "validate": 2, "wait": 2, "write": 3}
        assert seconds.keys() == runs.keys()
        assert min(seconds.values()) > 0


async def test_an_error_that_passes_all_handlers_is_answered() -> None:
    """What an inner application lets through is a 500 in the shape of all errors, with its id."""
    from deploy.http.watch import Watched

    async def broken(*_: Any) -> None:
        raise ZeroDivisionError

    app = Watched(broken, Watch(), frozenset())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.get("/", headers={"x-request-id": "7"})
    assert (response.status_code, response.json()["request_id"]) == (500, "7")
    assert response.json().keys() == {"error", "error_type", "loc", "request_id"}
