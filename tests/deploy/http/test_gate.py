"""The gate before the routes: keys, shares, and without keys the own machine alone."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from deploy.http.gate import OPEN, Gate
from deploy.http.hosts import is_loopback
from deploy.http.keys import hash_of, new_key
from deploy.http.routes import build_http_app
from deploy.http.tenants import Tenants
from deploy.settings import AccessSettings, LimitSettings
from tokenalign.errors import ConfigError

KEY, OTHER = new_key(), new_key()
WITH_KEY, WITH_OTHER = {"authorization": f"Bearer {KEY}"}, {"authorization": f"Bearer {OTHER}"}
KEYS: dict[str, tuple[str, ...]] = {"anna": (hash_of(KEY),), "bert": (hash_of(OTHER),)}
GOOD = {"text": "card", "labels": ["a", "b"]}


class FakeService:
    """Answers everything with nothing in particular; keeps the tenants of what it was asked."""

    def __init__(self) -> None:
        self.tenants: list[str | None] = []
        self.held: asyncio.Event | None = None

    def check_room(self) -> None:
        """There is always some."""

    async def classify(self, query: Any) -> dict[str, Any]:
        self.tenants.append(query.tenant)
        if self.held is not None:
            await self.held.wait()
        return {"results": []}

    async def classify_stream(self, query: Any) -> Any:
        yield {"index": 0}
        assert self.held is not None
        await self.held.wait()

    async def delete_label_set(self, set_id: str, *, tenant: str | None) -> None:
        self.tenants.append(tenant)

    async def ready(self) -> None:
        """At once."""

    def predict_label_set(self) -> None:
        """None."""

    def model_info(self) -> dict[str, Any]:
        return {"name": "fake"}

    def models_info(self) -> dict[str, Any]:
        return {"models": [{"name": "fake", "fingerprint": "f", "default": True}]}


Open = Callable[..., httpx.AsyncClient]


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def open_client(service: FakeService) -> Open:
    """Opens a client of the routes behind the gate of some access settings."""

    def build(client: tuple[str, int] = ("127.0.0.1", 1), *, per_key: bool = False, **access: Any) -> httpx.AsyncClient:
        settings = AccessSettings(**access)
        app: Any = build_http_app(
            service,  # type: ignore[arg-type]  # what the routes here need of it
            LimitSettings(),
            Tenants(per_key=per_key),
            gate=Gate.of(settings),
            cors_origins=settings.cors_origins,
        )
        transport = httpx.ASGITransport(app, client=client)
        opened = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")
        opened.app = app  # type: ignore[attr-defined]
        return opened

    return build


class TestKeys:
    async def test_a_good_key_passes(self, open_client: Open) -> None:
        """In any way that the scheme may be written."""
        client = open_client(keys=KEYS)
        for header in (f"Bearer {KEY}", f"bearer {OTHER}", f"BEARER  {KEY} "):
            answer = await client.post("/v1/classify", json=GOOD, headers={"authorization": header})
            assert answer.status_code == 200

    @pytest.mark.parametrize(
        ("headers", "words"),
        [
            ({}, "no API key came"),
            ({"authorization": ""}, "no API key came"),
            ({"authorization": "Bearer"}, "no API key came"),
            ({"authorization": f"Basic {KEY}"}, "no API key came"),
            ({"authorization": KEY}, "no API key came"),
            ({"x-api-key": KEY}, "no API key came"),
            ({"authorization": f"Bearer {KEY}x"}, "is none that is known here"),
            ({"authorization": f"Bearer {hash_of(KEY)}"}, "is none that is known here"),
            ({"authorization": "Bearer anna"}, "is none that is known here"),
        ],
    )
    async def test_without_one_nothing_is_answered(
        self, open_client: Open, service: FakeService, headers: dict[str, str], words: str
    ) -> None:
        """401 in the form of all errors, with the scheme to use, and not a word of the key that came."""
        answer = await open_client(keys=KEYS).post("/v1/classify", json=GOOD, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error_type"] == "unauthenticated"
        assert words in answer.json()["error"]
        assert KEY not in answer.text
        assert not service.tenants

    async def test_every_route_but_the_open_ones_asks(self, open_client: Open) -> None:
        """Also one that comes to be added, for the list is of those that don't ask."""
        client = open_client(keys=KEYS)
        routes = [route for route in client.app.routes if isinstance(route, Route)]  # type: ignore[attr-defined]
        asked = set()
        for route in routes:
            path = route.path.replace("{set_id}", "0" * 32).replace("{name:path}", "fake")
            for method in sorted((route.methods or set()) - {"HEAD"}):
                answer = await client.request(method, path)
                assert (answer.status_code == 401) == (route.path not in OPEN), (method, path, answer.text)
                asked.add(route.path)
        assert asked >= OPEN | {"/v1/classify", "/v1/model", "/v1/models", "/rerank", "/v2/models/{name:path}/infer"}

    @pytest.mark.parametrize(
        ("path", "form"),
        [("/rerank", {"error", "error_type"}), ("/v2/rerank", {"message"}), ("/v2/models/fake/infer", {"error"})],
    )
    async def test_dialects_tell_it_in_their_form(self, open_client: Open, path: str, form: set[str]) -> None:
        """Their clients read errors in the shape that they know."""
        answer = await open_client(keys=KEYS).post(path, json={})
        assert answer.status_code == 401
        assert set(answer.json()) == form

    async def test_nothing_of_the_body_is_read(self, open_client: Open) -> None:
        """A stranger's gigabytes stay with the stranger."""
        client = open_client(keys=KEYS)

        async def receive() -> Any:
            pytest.fail("the body was read")

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/classify", "headers": [], "query_string": b""}
        await client.app(scope, receive, send)  # type: ignore[attr-defined]
        assert sent[0]["status"] == 401

    async def test_the_document_says_where_a_key_is_needed(self, open_client: Open) -> None:
        """OpenAPI names the scheme, each route that asks for it, and its 401; without keys it says nothing of them."""
        document = (await open_client(keys=KEYS).get("/openapi.json")).json()
        assert document["components"]["securitySchemes"]["ApiKey"]["scheme"] == "bearer"
        for path, operations in document["paths"].items():
            for operation in operations.values():
                assert ("security" in operation) == (path not in OPEN), path
                assert ("401" in operation["responses"]) == (path not in OPEN), path
        plain = (await open_client(allow_unauthenticated=True).get("/openapi.json")).text
        assert "securitySchemes" not in plain

    async def test_a_changed_file_is_heeded_without_a_restart(
        self, open_client: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A new key in the file is good, and the old one is not any more."""
        monkeypatch.setattr("deploy.http.keys.CHECK_PERIOD_S", 0.0)
        file = tmp_path / "keys"
        file.write_text(f"anna {hash_of(KEY)}\n")
        client = open_client(keys_file=file)
        assert (await client.get("/v1/model", headers=WITH_KEY)).status_code == 200
        file.write_text(f"anna {hash_of(OTHER)}\n# rotated\n")
        assert (await client.get("/v1/model", headers=WITH_KEY)).status_code == 401
        assert (await client.get("/v1/model", headers=WITH_OTHER)).status_code == 200

    async def test_tenants_are_the_keys_names(self, open_client: Open, service: FakeService) -> None:
        """Keys of one name are one tenant, so that a new key finds what the old one left; other names are others."""
        third = new_key()
        keys = {**KEYS, "anna": (hash_of(KEY), hash_of(third))}
        client = open_client(per_key=True, keys=keys)
        for key in (KEY, third, OTHER):
            await client.delete(f"/v1/label-sets/{'0' * 32}", headers={"authorization": f"bearer {key}"})
        first, second, other = service.tenants
        assert first == second != other
        assert first is not None
        assert len(first) == 64

    def test_a_wrong_file_stops_the_start(self, tmp_path: Path) -> None:
        """A service that would refuse everybody is not started."""
        with pytest.raises(ConfigError, match=r"access\.keys_file"):
            Gate.of(AccessSettings(keys_file=tmp_path / "nowhere"))


class TestShares:
    async def test_too_many_at_a_time(self, open_client: Open, service: FakeService) -> None:
        """429 with Retry-After, until one is answered; another key is not held up."""
        service.held = asyncio.Event()
        client = open_client(keys=KEYS, max_concurrent_per_key=1)
        first = asyncio.create_task(client.post("/v1/classify", json=GOOD, headers=WITH_KEY))
        while not service.tenants:  # noqa: ASYNC110  a condition of the other task
            await asyncio.sleep(0)
        refused = await client.post("/v1/classify", json=GOOD, headers=WITH_KEY)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error_type"] == "over_quota"
        assert (await client.get("/v1/model", headers=WITH_OTHER)).status_code == 200
        service.held.set()
        assert (await first).status_code == 200
        assert (await client.get("/v1/model", headers=WITH_KEY)).status_code == 200

    async def test_a_caller_who_leaves_gives_its_place_back(self, open_client: Open, service: FakeService) -> None:
        """A request that is cancelled in its middle is not in progress any more."""
        service.held = asyncio.Event()
        client = open_client(keys=KEYS, max_concurrent_per_key=1)
        first = asyncio.create_task(client.post("/v1/classify", json=GOOD, headers=WITH_KEY))
        while not service.tenants:  # noqa: ASYNC110  a condition of the other task
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        assert (await client.get("/v1/model", headers=WITH_KEY)).status_code == 200

    async def test_too_many_a_second(self, open_client: Open) -> None:
        """429 with the whole seconds until the next is let through; a wrong key costs nobody's share."""
        client = open_client(keys=KEYS, requests_per_s_per_key=0.001, burst_per_key=2)
        codes = [
            (await client.get("/v1/model", headers=headers)).status_code
            for headers in (WITH_KEY, {}, {"authorization": "Bearer x"}, WITH_KEY, WITH_KEY, WITH_OTHER)
        ]
        assert codes == [200, 401, 401, 200, 429, 200]
        refused = await client.get("/v1/model", headers=WITH_KEY)
        assert 990 <= int(refused.headers["retry-after"]) <= 1_000

    async def test_health_is_no_request_of_anybodys(self, open_client: Open) -> None:
        """Who watches the service needs no key and is never refused."""
        client = open_client(keys=KEYS, requests_per_s_per_key=0.001, burst_per_key=1)
        codes = [(await client.get("/health/ready")).status_code for _ in range(5)]
        assert codes == [200] * 5

    async def test_readings_have_names_and_no_keys(self) -> None:
        """What was let through by name, and what was refused by reason."""
        gate = Gate.of(AccessSettings(keys=KEYS, requests_per_s_per_key=0.001, burst_per_key=1))

        def enter(header: str) -> None:
            try:
                gate.enter({"type": "http", "headers": [(b"authorization", header.encode())]})
            except Exception:  # noqa: BLE001  counted
                return

        for header in (f"Bearer {KEY}", f"Bearer {KEY}", "Bearer wrong", ""):
            enter(header)
        found = {(reading.metric.name, *reading.tags): reading.value for reading in gate.readings()}
        assert found == {
            ("tokenalign_key_requests_total", "anna"): 1,
            ("tokenalign_refused_requests_total", "anna", "quota"): 1,
            ("tokenalign_refused_requests_total", "", "wrong_key"): 1,
            ("tokenalign_refused_requests_total", "", "no_key"): 1,
        }


class TestWithoutKeys:
    @pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "127.9.9.9"])
    async def test_the_own_machine_passes(self, open_client: Open, host: str) -> None:
        """By any of its loopback names."""
        assert (await open_client().get("/v1/model", headers={"host": host})).status_code == 200

    @pytest.mark.parametrize(
        "host", ["10.0.0.5:8000", "example.com", "localhost.example.com", "0.0.0.0:8000", "::", ""]
    )
    async def test_other_names_are_refused(self, open_client: Open, host: str) -> None:
        """403 with what to set: the service was put where others reach it, or a page has its name lead here."""
        answer = await open_client().get("/v1/model", headers={"host": host})
        assert answer.status_code == 403
        assert answer.json()["error_type"] == "not_local"
        assert "access.keys_file" in answer.json()["error"]

    async def test_other_machines_are_refused(self, open_client: Open) -> None:
        """Whatever name they call it by."""
        assert (await open_client(("10.0.0.7", 1)).get("/v1/model")).status_code == 403
        assert (await open_client(("::1", 1)).get("/v1/model")).status_code == 200

    async def test_other_sites_pages_are_refused(self, open_client: Open) -> None:
        """A page may send a request without asking; ours may, and those that the settings name."""
        friend = "https://friend.example"
        client = open_client(cors_origins=(friend,))
        origins = {"https://other.example": 403, "null": 403, "http://127.0.0.1:8000": 200, friend: 200}
        for origin, status in origins.items():
            assert (await client.get("/v1/model", headers={"origin": origin})).status_code == status, origin

    async def test_health_and_page_are_open(self, open_client: Open) -> None:
        """Probes come from elsewhere."""
        client = open_client(("10.0.0.7", 1))
        for path in ("/health/live", "/health/ready", "/"):
            assert (await client.get(path, headers={"host": "10.0.0.5"})).status_code == 200

    async def test_everybody_where_the_settings_say_so(self, open_client: Open) -> None:
        """Something in front sees who asks."""
        client = open_client(("10.0.0.7", 1), allow_unauthenticated=True)
        assert (await client.get("/v1/model", headers={"host": "example.com"})).status_code == 200


class TestOrigins:
    async def test_off_by_default(self, open_client: Open) -> None:
        """No browser is told that a page of another origin may ask."""
        answer = await open_client(keys=KEYS).options(
            "/v1/classify", headers={"origin": "https://a.example", "access-control-request-method": "POST"}
        )
        assert answer.status_code == 405
        assert not any(name.startswith("access-control") for name in answer.headers)

    async def test_origins_of_the_settings(self, open_client: Open) -> None:
        """Their pages may ask, with a key, and read the headers that matter; others may not."""
        client = open_client(keys=KEYS, cors_origins=("https://a.example",))
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
        good = await client.options("/v1/classify", headers={"origin": "https://a.example", **ask})
        assert good.status_code == 200
        assert good.headers["access-control-allow-origin"] == "https://a.example"
        assert "access-control-allow-credentials" not in good.headers
        bad = await client.options("/v1/classify", headers={"origin": "https://b.example", **ask})
        assert "access-control-allow-origin" not in bad.headers
        refused = await client.post("/v1/classify", json=GOOD, headers={"origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        assert "Retry-After" in refused.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, True) for host in ("127.0.0.1", "::1", "[::1]", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "127.0.0.1.example.com", "", "127.1")),  # noqa: S104
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    """An address or name that nobody else reaches."""
    assert is_loopback(host) is expected


async def test_a_gate_that_is_open_costs_nothing() -> None:
    """Where everybody passes, nothing stands before the routes."""

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        await Response()(scope, receive, send)

    from deploy.http.gate import guard

    route = Route("/v1/classify", endpoint)
    before = route.app
    guard([route], Gate())
    assert route.app is before
