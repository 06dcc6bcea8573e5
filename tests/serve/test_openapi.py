"""The OpenAPI document against the served application: whatever a request of it holds, no answer is a 5xx."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]


def test_no_request_of_the_document_is_a_500(default_app: Any, tmp_path: Path) -> None:
    """Schemathesis sends what the document allows, and what it doesn't, to every route; none answers with a 5xx."""
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"{default_app.url}/openapi.json",
            "--checks=not_a_server_error",
            "--phases=examples,coverage,fuzzing",
            "--max-examples=12",
            "--seed=1",
            "--request-timeout=60",
            "--generation-database=none",
            "--no-color",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=tmp_path,
    )
    assert done.returncode == 0, f"{done.stdout[-8_000:]}\n{done.stderr[-2_000:]}"
