"""The page as it is served: its bytes, and headers that let it reach nothing else."""

import base64
import hashlib
import re
from importlib import resources
from typing import Any

import httpx
import pytest

from deploy.http.page import Page
from deploy.http.routes import build_http_app
from deploy.settings import LimitSettings

SOURCE = resources.files("deploy.http.page").joinpath("page.html").read_bytes()


async def response_at(path: str, prefix: str = "") -> httpx.Response:
    """The response to a GET, of an application without a service: the page needs none."""
    service: Any = None
    transport = httpx.ASGITransport(build_http_app(service, LimitSettings()), root_path=prefix)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.get(path)


def policy_of(response: httpx.Response) -> dict[str, str]:
    parts = response.headers["content-security-policy"].split("; ")
    return {name: value for name, _, value in (part.partition(" ") for part in parts)}


@pytest.mark.parametrize("prefix", ["", "/some/prefix"])
async def test_the_root_is_the_page(prefix: str) -> None:
    """Who opens the address gets the page byte for byte, also behind a prefix."""
    response = await response_at(f"{prefix}/", prefix)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.content == SOURCE


async def test_the_page_may_reach_only_the_service() -> None:
    """Nothing is allowed but its own script and style, by hash, its icon, and calls to the host that served it."""
    policy = policy_of(await response_at("/"))
    for tag in ("script", "style"):
        (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), SOURCE, flags=re.DOTALL)
        assert policy.pop(f"{tag}-src") == f"'sha256-{base64.b64encode(hashlib.sha256(inline).digest()).decode()}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


async def test_headers_against_guessing_and_leaking() -> None:
    """No guessing of content types, no address in a Referer, and never a stale page."""
    headers = (await response_at("/")).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-cache"


def test_addresses_in_the_page_are_relative() -> None:
    """It names no host and no absolute path, so that it works behind any prefix; the one URL is an XML namespace."""
    text = SOURCE.decode()
    assert set(re.findall(r"\w+://[^\s'\"`)]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"""(?:href|src|action)=["']/|["'`]/(?:v1|docs)""", text)


def test_what_people_type_never_becomes_markup() -> None:
    """The script has no way to turn a string into elements or code."""
    assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", SOURCE)


@pytest.mark.parametrize(
    "content",
    [
        b"<style></style>",
        b"<style></style><script></script><script></script>",
        b"<style></style><script></script><script src='x'></script>",
        b"<style></style><script defer></script>",
        b"<script></script>",
    ],
)
def test_a_page_that_the_policy_would_break_is_refused(content: bytes) -> None:
    """A script or style that the browser would refuse is an error when the application is built."""
    with pytest.raises(ValueError, match="exactly one inline"):
        Page.of(content)
