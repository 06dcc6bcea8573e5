"""docs/api.md says what is served: every key, every kind of error, and requests that are good."""

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest

from deploy.http.routes import build_http_app
from deploy.http.schemas import ClassifyRequest, ResultSchema, parse_classify, parse_label_set
from deploy.settings import LimitSettings

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
REQUESTS = re.findall(r"```json request\n(.*?)```", PAGE, flags=re.DOTALL)


def first_cells(heading: str) -> set[str]:
    """The words in backticks of the first column of the table whose head begins with `heading`."""
    table = re.search(rf"^\| {re.escape(heading)} \|.*?\n\n", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert table is not None
    cells = re.findall(r"^\| (.*?) \|", table.group(), flags=re.MULTILINE)
    return {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}


def test_every_key_is_documented() -> None:
    """The table of a request's keys has each of them and no other."""
    assert first_cells("key") == set(ClassifyRequest.model_fields)


def test_every_key_of_a_result_is_documented() -> None:
    """So has the table of an answer's."""
    assert first_cells("of a result") == set(ResultSchema.model_fields)


def test_every_error_is_documented() -> None:
    """Status and type of each error that the service's code names, and no other."""
    source = (ROOT / "deploy" / "http" / "errors.py").read_text(encoding="utf-8")
    served = set(re.findall(r"HttpError\((\d+), \"(\w+)\"", source))
    served |= {("404", "not_found"), ("405", "method_not_allowed")}
    assert set(re.findall(r"^\| (\d+) \| `(\w+)` \|", PAGE, flags=re.MULTILINE)) == served


def test_every_native_route_is_documented() -> None:
    """Each path under /v1 that is no dialect's is in the table."""
    documented = set(re.findall(r"`(?:(?:GET|POST|DELETE) )?(/(?:v1|health)/[\w/{}-]+)`", PAGE))
    paths = {str(getattr(route, "path", "")) for route in build_http_app(cast("Any", None), LimitSettings()).routes}
    native = {path for path in paths if path.startswith(("/v1/", "/health/"))} - {"/v1/rerank"}
    assert documented == {path.replace("{set_id}", "{id}") for path in native}


@pytest.mark.parametrize("request_body", REQUESTS)
def test_requests_are_good(request_body: str) -> None:
    """Each request of the page is taken."""
    body = json.loads(request_body)
    if "text" in body or "texts" in body:
        parse_classify(body, LimitSettings())
    else:
        parse_label_set(body, LimitSettings())


def test_there_are_requests() -> None:
    """Of both kinds."""
    assert len(REQUESTS) == 3
