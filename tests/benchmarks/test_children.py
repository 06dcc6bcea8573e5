"""Measuring processes answer, and their failures are told."""

import pytest

from tests.benchmarks.children import Child, ChildError


def test_an_error_is_told() -> None:
    """A question that fails is answered with the reason, and the process goes on."""
    with Child("tests.benchmarks.random_qwen3") as child:
        for _ in range(2):
            with pytest.raises(ChildError, match=r"random_qwen3: build: TypeError: .*folder"):
                child.ask("build")


def test_a_process_that_ended() -> None:
    """Its last words are in the error."""
    with Child("tests.benchmarks.no_such_module") as child, pytest.raises(ChildError, match="No module named"):
        child.ask("anything")
