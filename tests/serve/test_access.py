"""An application with keys and secrets: strangers stay out, keys change without a restart, and no secret is told."""

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deploy.http.keys import hash_of, new_key

pytestmark = [pytest.mark.serve, pytest.mark.nightly, pytest.mark.timeout(600)]

GOOD = {"text": "I was charged twice.", "labels": ["duplicate payment", "card not received"]}
HEEDED_S = 60.0  # far more than the second in which a changed file is heeded


@pytest.fixture(scope="module")
def key() -> str:
    return new_key()


@pytest.fixture(scope="module")
def signing_key() -> str:
    return f"signing-{secrets.token_hex(16)}"


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory, key: str) -> Path:
    """A file with one key."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"anna {hash_of(key)}\n")
    return path


@pytest.fixture(scope="module")
def served(
    launch: Callable[[Any], AbstractContextManager[Any]],
    project_config: Callable[[], Any],
    wait_until_ready: Callable[..., None],
    keys_file: Path,
    signing_key: str,
) -> Iterator[Any]:
    """The application, with API keys and a secret of the label store's."""
    (keys_file.parent / "signing-key").write_text(signing_key)
    config = project_config()
    args = config["applications"][0]["args"]
    args["access"] = {"keys_file": str(keys_file)}
    args["label_cache"]["signing_key"] = {"file": str(keys_file.parent / "signing-key")}
    with launch(config) as running:
        wait_until_ready(running)
        yield running


def ask(served: Any, key: str | None) -> int:
    """The status of the answer to a good request."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"{served.url}/v1/classify", json=GOOD, headers=headers, timeout=60, trust_env=False)
    return answer.status_code


def test_who_has_a_key_is_answered(served: Any, key: str) -> None:
    """And nobody else, by the same address."""
    assert [ask(served, one) for one in (key, None, new_key(), key[:-1])] == [200, 401, 401, 401]


def test_no_secret_is_told(served: Any, key: str, signing_key: str) -> None:
    """Neither in what Serve tells of the application, nor in a command line, a log, or what is told of the model."""
    root = psutil.Process(served.process.pid)
    processes = root.children(recursive=True)
    commands = [" ".join(process.cmdline()) for process in processes if process.status() != psutil.STATUS_ZOMBIE]
    [session] = {found[0] for command in commands if (found := re.search(r"/\S*/session_[0-9_-]+", command))}
    [gcs] = [process for process in processes if process.name() == "gcs_server"]
    ours = next(process.environ() for process in processes if "RAY_AUTH_TOKEN_PATH" in process.environ())
    [port] = [one.laddr.port for one in gcs.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    status = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import ray; from ray import serve; "
            f"ray.init('127.0.0.1:{port}', namespace='serve', log_to_driver=False); print(serve.status())",
        ],
        env={**os.environ, **{name: value for name, value in ours.items() if name.startswith("RAY_")}},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "Ingress" in status
    with_key = {"authorization": f"Bearer {key}"}
    model = httpx.get(f"{served.url}/v1/model", headers=with_key, timeout=60, trust_env=False)
    assert model.status_code == 200
    told = [status, model.text, served.log.read_text(), *commands]
    told += [path.read_text(errors="replace") for path in Path(session).rglob("*") if path.is_file()]
    token = Path(ours["RAY_AUTH_TOKEN_PATH"]).read_text()
    for secret in (key, signing_key, token):
        assert not any(secret in one for one in told)


def test_keys_change_without_a_restart(served: Any, key: str, keys_file: Path) -> None:
    """A new line is heeded while the old key still is good, and then the old one is gone."""
    new = new_key()
    for lines, good, bad in (
        (f"anna {hash_of(key)}\nanna {hash_of(new)}\n", (key, new), ()),
        (f"anna {hash_of(new)}\n", (new,), (key,)),
    ):
        keys_file.write_text(lines)
        deadline = time.monotonic() + HEEDED_S
        wanted = [200] * len(good) + [401] * len(bad)
        while (found := [ask(served, one) for one in (*good, *bad)]) != wanted:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)  # a condition of another process, asked for again
