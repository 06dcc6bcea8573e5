"""`tokenalign-deploy labels`: has a running service keep the labels of a file, and says what is wrong with them."""

import argparse
import json
import os
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from tokenalign.errors import ConfigError, TokenAlignError
from tokenalign.label_files import LabelFile

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 120.0
API_KEY_ENV = "TOKENALIGN_API_KEY"  # an option would show the key to everybody who lists processes
_ANSWER_KEYS = {"id", "name", "labels", "descriptions", "labels_cached", "warnings"}
_SHOWN_CHARS = 500  # of an answer that isn't the service's


class ServiceError(TokenAlignError):
    """The service could not be reached, or refused what was asked."""


def add_labels_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `labels` and its own commands to a parser."""
    labels = commands.add_parser("labels", help="keep label sets on a running service")
    warm = labels.add_subparsers(dest="labels_command", required=True).add_parser(
        "warm",
        help="keep a list of labels under an id and encode them",
        description="Posts the labels of a file to a running service, which encodes them and keeps them under an id. "
        "Prints the id, and labels that are cut or hardly told apart. "
        f"Where the service asks for an API key, it is taken from the environment variable {API_KEY_ENV}. "
        "Exit status: 0 done, 1 the service refused or can't be reached, 2 the file or an option is wrong.",
    )
    warm.add_argument(
        "--file",
        type=Path,
        required=True,
        help='one label a line; a line that begins with { is JSON: {"name": "…", "description": "…" or ["…", …]}',
    )
    warm.add_argument("--url", default=DEFAULT_URL, help="of the service, with its prefix; default: %(default)s")
    warm.add_argument("--name", help="what the set is called, for people")
    warm.add_argument("--timeout-s", type=float, default=DEFAULT_TIMEOUT_S, help="default: %(default)g")
    warm.add_argument("--json", action="store_true", help="print the service's answer, for machines")


def warm_labels(options: argparse.Namespace) -> None:
    """Does what the options of `labels warm` say and prints the outcome.

    Raises `ConfigError` for a wrong file or option, and `ServiceError` with what the service said.
    """
    file = LabelFile.read(options.file)
    url = _checked_url(options.url)
    if not options.timeout_s > 0:
        raise ConfigError(f"--timeout-s is {options.timeout_s:g}; give a number of seconds above 0")
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(API_KEY_ENV, ""):
        headers["Authorization"] = _bearer(key)
    body: dict[str, Any] = {"labels": list(file.labels)}
    if options.name is not None:
        body["name"] = options.name
    status, answer = _post_patiently(f"{url}/v1/label-sets", body, headers, options.timeout_s)
    if status not in (200, 201) or not (isinstance(answer, dict) and answer.keys() >= _ANSWER_KEYS):
        raise ServiceError(_refusal(url, file, status, answer))
    print(json.dumps(answer, ensure_ascii=False) if options.json else _report(file, answer, new=status == 201))


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--url is {url!r}; give the address of the service, such as {DEFAULT_URL}")
    if parts.query or parts.fragment:
        raise ConfigError(f"--url is {url!r}; leave out what follows the path")
    return url.rstrip("/")


def _bearer(key: str) -> str:
    """The header's value; `ConfigError`, which does not repeat the key, for one that no header could hold."""
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"{API_KEY_ENV}: must be printable ASCII; correct the environment variable")
    return f"Bearer {key}"


def _post_patiently(url: str, body: dict[str, Any], headers: dict[str, str], timeout_s: float) -> tuple[int, Any]:
    """As `_post`, and again after each 504 while time is left: what was encoded by then is kept."""
    deadline = time.monotonic() + timeout_s
    status, answer = _post(url, body, headers, timeout_s)
    while status == 504 and (left_s := deadline - time.monotonic()) > 0:
        status, answer = _post(url, body, headers, left_s)
    return status, answer


def _post(url: str, body: dict[str, Any], headers: dict[str, str], timeout_s: float) -> tuple[int, Any]:
    """Status and JSON of the answer, whatever the status is; the text itself where it is no JSON."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)  # noqa: S310  checked above
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:  # noqa: S310
            return response.status, _parsed(response.read())
    except HTTPError as error:
        with error:
            return error.code, _parsed(error.read())
    except TimeoutError as error:
        raise ServiceError(
            f"{url} did not answer within {timeout_s:g} s; give a longer --timeout-s, or try again: "
            "what was encoded by then is kept"
        ) from error
    except (URLError, HTTPException, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise ServiceError(f"{url} can't be reached: {reason}; is the service running, and is --url right?") from error


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace").strip()[:_SHOWN_CHARS]


def _refusal(url: str, file: LabelFile, status: int, answer: Any) -> str:
    """What the service said, the place in the request as a line of the file."""
    if not isinstance(answer, dict) or not isinstance(answer.get("error"), str):
        said = f": {answer}" if answer else ""
        return f"{url} answered with status {status} and not as tokenalign does{said}; is --url right?"
    loc = answer.get("loc")
    place = f"{file.place(tuple(loc))}: " if isinstance(loc, list) and loc[:1] == ["labels"] else ""
    return f"{place}{answer['error']} (status {status})"


def _report(file: LabelFile, answer: dict[str, Any], *, new: bool) -> str:
    """The answer in words, the id first and alone on its line."""
    descriptions, cached = answer["descriptions"], answer["labels_cached"]
    called = f" {answer['name']!r}" if answer["name"] is not None else ""
    lines = [
        answer["id"],
        f"  {'new' if new else 'known'} label set{called}: {_count(answer['labels'], 'label')}, "
        f"{_count(descriptions, 'description')}, {descriptions - cached} encoded now, {cached} known before",
    ]
    warnings = answer["warnings"]
    lines.append(f"  {_count(len(warnings), 'warning')}{':' if warnings else ''}")
    lines += [f"    {file.place(tuple(w['loc']))}: {w['type']}: {w['message']}" for w in warnings]
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
