"""What a user names as a model, told by its kind."""

from pathlib import Path
from typing import Any

import pytest

from tokenalign.errors import CheckpointError
from tokenalign.linear.kind import names_linear


def test_folders_and_shipped_heads_are_told_apart(make_linear: Any, bert_backbone: Path, bert_head: Path) -> None:
    """The default, None, is an alignment head."""
    linear = make_linear(bert_backbone)
    assert [names_linear(given) for given in (linear, bert_head, "minilm-intents", None)] == [True, False, False, False]


def test_a_hub_head_must_be_had_to_be_told() -> None:
    """One that isn't in the cache, with downloads off, is an error and not taken for either."""
    with pytest.raises(CheckpointError, match="local_files_only"):
        names_linear("nobody/nothing", local_files_only=True)
