"""Keys name one namespace, one model and one list, and nothing else."""

import pytest

from deploy.label_cache.keys import CacheKeys

KEYS = CacheKeys("tokenalign", "f1")


def test_the_key_format_is_fixed() -> None:
    """Replicas of two releases find each other's entries: the format changes only with the schema number."""
    digest = "065384d96bfc9216c5f920c1ac360add82a294fb0c91036c3537cb285bdb9c0a"
    assert KEYS.label("top up") == f"tokenalign:1:f1:label:{digest}"


def test_order_and_repeats_do_not_change_a_list_key() -> None:
    """A permuted list, or one with repeats, is the same list."""
    assert KEYS.list(["b", "a", "b"]) == KEYS.list(["a", "b"])


def test_lists_that_join_alike_have_different_keys() -> None:
    """A comma or a NUL within a label never makes two lists one."""
    assert len({KEYS.list(d) for d in (["a", "b"], ["a,b"], ["a\x00b"], ["ab"], ["b"])}) == 5


def test_kinds_never_meet() -> None:
    """A list of one description, that description, and the list's mark are three entries."""
    assert len({KEYS.list(["a"]), KEYS.label("a"), KEYS.seen(["a"])}) == 3


@pytest.mark.parametrize("part", ["", "a:b", "a b", "{a}", "ä", "x" * 129, "a\n"])
def test_a_part_that_could_run_into_another_is_refused(part: str) -> None:
    """Namespace and fingerprint can't hold a separator, a cluster hash tag, or be empty."""
    with pytest.raises(ValueError, match="namespace"):
        CacheKeys(part, "f1")
    with pytest.raises(ValueError, match="fingerprint"):
        CacheKeys("tokenalign", part)
