"""Small random models to compress."""

from pathlib import Path

import pytest

from tests.tokenalign.compression.models import THIN, qwen35_config, save_random


@pytest.fixture(scope="session")
def thin24(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 of 24 layers of width 32 with 600 rows; it has no tokenizer."""
    return save_random(qwen35_config(24, 600, **THIN), tmp_path_factory.mktemp("thin24"))
