"""The application, whose encoders may be told to begin a forward pass that never ends."""

import os
import time
from pathlib import Path
from typing import Any

from ray import serve

import deploy.app

TRAP = "TOKENALIGN_TEST_TRAP"
"""Environment variable: a file that the next pass takes away, and then sleeps for ever."""


class EncoderDeployment(deploy.app.EncoderDeployment):
    """The encoder, which looks for the trap before each pass."""

    def _rows(self, *args: Any, **options: Any) -> Any:
        try:
            Path(os.environ[TRAP]).unlink()
        except FileNotFoundError:
            return super()._rows(*args, **options)
        while True:
            time.sleep(1)


def build_app(args: dict[str, Any]) -> serve.Application:
    """The application of `deploy.app` with these encoders."""
    deploy.app.EncoderDeployment = EncoderDeployment  # type: ignore[misc]
    return deploy.app.build_app(args)
