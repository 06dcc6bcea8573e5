"""The running application tells what the dashboards and alerts ask for, and answers with the ids of requests."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

MONITORING = Path(__file__).parents[2] / "k8s" / "components" / "monitoring"
NAME = re.compile(r"\bray_[a-z][a-z0-9_]*")
PATIENCE_S = 120.0  # Ray tells its metrics every ten seconds

# What an application that is well, on a CPU and without autoscaling, has no reason to tell. Counters begin when they
# first count; tests/k8s/test_monitoring.py sees that they exist.
NOT_WHEN_ALL_IS_WELL = {
    "ray_tokenalign_batch_retries_total": "no replica was lost",
    "ray_tokenalign_refused_requests_total": "everybody may ask",
    "ray_tokenalign_label_cache_store_errors_total": "the store answers",
    "ray_tokenalign_label_cache_skipped_writes_total": "the store keeps up",
    "ray_tokenalign_label_cache_evictions_total": "memory has room",
    "ray_tokenalign_label_cache_lock_waits_total": "there is one scorer",
    "ray_tokenalign_label_cache_lock_takeovers_total": "likewise",
    "ray_tokenalign_label_cache_lock_timeouts_total": "likewise",
    "ray_tokenalign_label_sets_damaged_total": "all definitions are sound",
    "ray_serve_autoscaling_desired_replicas": "nothing scales by itself",
    "ray_node_gpus_utilization": "there is no GPU",
}


def expressions() -> Iterator[tuple[str, str]]:
    """(where, query) of every alert and every panel."""
    for group in yaml.safe_load((MONITORING / "rules.yaml").read_text(encoding="utf-8"))["spec"]["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for path in MONITORING.glob("*.json"):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                yield panel["title"], target["expr"].replace("$__rate_interval", "1m")


def names_in(query: str) -> set[str]:
    """The series that a query asks for."""
    return set(NAME.findall(query))


@pytest.fixture(scope="module")
def metrics_url(default_app: Any) -> str:
    """Where the application said that its metrics are."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := re.search(r"metrics for Prometheus at (\S+)", default_app.log.read_text())) is None:
        assert time.monotonic() < deadline, default_app.log.read_text()
        time.sleep(0.2)  # a condition of another process, asked for again
    return found[1]


@pytest.fixture(scope="module")
def client(default_app: Any) -> Iterator[httpx.Client]:
    """A client of the running application."""
    with httpx.Client(base_url=default_app.url, timeout=60, trust_env=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def used(client: httpx.Client) -> None:
    """Some of everything was asked: a cut text, a list again, a label set from first to last, and what is refused."""
    labels = ["card not received", "cash withdrawal declined", "watched " * 300]
    for texts in (["card"], ["card", "cash " * 300]):
        for _ in range(3):
            assert client.post("/v1/classify", json={"texts": texts, "labels": labels}).status_code == 200
    for part in (labels[:2], labels[1:]):  # other lists of the same labels, which are in the store
        assert client.post("/v1/classify", json={"text": "card", "labels": part}).status_code == 200
    made = client.post("/v1/label-sets", json={"labels": ["watched one", "watched two"]}).json()
    path = f"/v1/label-sets/{made['id']}"
    assert client.post("/v1/classify", json={"text": "card", "label_set": made["id"]}).status_code == 200
    assert [client.get(path).status_code, client.delete(path).status_code, client.get(path).status_code][:2] == [
        200,
        204,
    ]
    assert client.post("/v1/classify", json={"text": "card", "label_set": "0" * 32}).status_code == 404
    assert client.post("/v1/classify", json={"text": "card", "labels": []}).status_code == 422


def until(condition: Callable[[], bool], words: Callable[[], Any]) -> None:
    """Returns once the condition holds; fails with words about it when it doesn't for too long."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, words()
        time.sleep(0.5)  # a condition of another process, asked for again


@pytest.mark.usefixtures("used")
def test_every_query_names_a_metric_that_is_told(metrics_url: str) -> None:
    """Each series of an alert or a panel is given out by the running application, but for what only trouble brings."""
    wanted = {name for _, query in expressions() for name in names_in(query)}
    assert NOT_WHEN_ALL_IS_WELL.keys() <= wanted
    missing = wanted - NOT_WHEN_ALL_IS_WELL.keys()

    def all_told() -> bool:
        # Gauges come and go: Ray gives each out once after it was set.
        for line in httpx.get(metrics_url, trust_env=False, timeout=30).text.splitlines():
            missing.discard(line.partition("{")[0])
        return not missing

    until(all_told, lambda: missing)


@pytest.mark.usefixtures("used")
def test_nothing_that_was_asked_is_in_a_metric(metrics_url: str) -> None:
    """No text, label, id of a label set or id of a request is a label's value."""
    text = httpx.get(metrics_url, trust_env=False, timeout=30).text
    own = [line for line in text.splitlines() if line.startswith("ray_tokenalign_")]
    values = {value for line in own for value in re.findall(r'[a-z_]+="([^"]*)"', line)}
    assert own
    assert not [value for value in values if re.search("watched|cash|card|^[0-9a-f]{32}$", value)]


@pytest.fixture(scope="module")
def prometheus(
    metrics_url: str, used: None, free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Debian's Prometheus that scrapes the application and has its rules; skipped without it, but not under CI=true."""
    if (program := shutil.which("prometheus")) is None:
        reason = "prometheus is absent (Debian's package)"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}, and CI must not skip what needs it")
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("prometheus")
    rules = yaml.safe_load((MONITORING / "rules.yaml").read_text(encoding="utf-8"))["spec"]
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    target = metrics_url.removeprefix("http://").removesuffix("/metrics")
    scrape = {"job_name": "ray", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    (folder / "prometheus.yaml").write_text(
        yaml.safe_dump(
            {"global": {"evaluation_interval": "1s"}, "rule_files": ["rules.yaml"], "scrape_configs": [scrape]}
        )
    )
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, *options, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}/api/v1", timeout=30, trust_env=False) as api:

            def scraped() -> bool:
                with contextlib.suppress(httpx.TransportError, json.JSONDecodeError):  # it starts
                    return bool(results(api, "ray_tokenalign_model_info"))
                return False

            until(scraped, (folder / "log").read_text)
            yield api
    finally:
        process.terminate()
        process.wait(30)


def results(api: httpx.Client, query: str) -> list[Any]:
    """What Prometheus answers to a query; fails with its words where it refuses."""
    answer = api.get("/query", params={"query": query}).json()
    assert answer["status"] == "success", f"{query}: {answer}"
    found: list[Any] = answer["data"]["result"]
    return found


def test_prometheus_answers_every_query(prometheus: httpx.Client) -> None:
    """Each is one that Prometheus evaluates over what it scraped, and what should have a value has one."""
    for _, query in expressions():
        results(prometheus, query)
    for query in (
        "sum by (model, fingerprint) (ray_tokenalign_model_info) == 3",  # an ingress, a scorer, an encoder
        'ray_tokenalign_http_request_seconds_count{route="/v1/classify", status="200"} >= 7',
        'ray_tokenalign_http_request_seconds_count{route="/v1/classify", status="404"} >= 1',
        "sum(ray_tokenalign_truncated_texts_total) >= 3",
        'sum(ray_tokenalign_label_cache_hits_total{tier="memory"}) >= 1',
    ):
        until(lambda query=query: bool(results(prometheus, query)), lambda query=query: query)  # type: ignore[misc]


def test_no_alert_is_near_when_all_is_well(prometheus: httpx.Client) -> None:
    """No condition of an alert holds, not even for a moment; but how full the machine is, is not the application's."""
    states: dict[str, str] = {}

    def calm() -> bool:
        groups = prometheus.get("/rules").json()["data"]["groups"]
        states.update({rule["name"]: rule["state"] for group in groups for rule in group["rules"]})
        return {state for name, state in states.items() if name != "TokenalignMemory"} == {"inactive"}

    until(calm, lambda: states)
    assert len(states) == sum(1 for where, _ in expressions() if where.startswith("Tokenalign"))


@pytest.mark.parametrize("given", ["mine-7", None])
def test_an_answer_has_one_id(client: httpx.Client, given: str | None) -> None:
    """The caller's, or a new one; once in the header, whatever stands in front, and the same in an error's body."""
    headers = {} if given is None else {"x-request-id": given}
    for body in ({"text": "a", "labels": ["b", "c"]}, {"text": "a", "labels": []}):
        response = client.post("/v1/classify", json=body, headers=headers)
        [named] = response.headers.get_list("x-request-id")
        assert given in (None, named)
        assert named
        if response.status_code != 200:
            assert response.json()["request_id"] == named
