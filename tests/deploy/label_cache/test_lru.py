"""The bound in bytes holds whatever is put in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.label_cache.lru import ENTRY_OVERHEAD_BYTES, ByteLru


def test_the_least_recently_used_goes_first() -> None:
    """Reading an entry keeps it; the one that nobody read is evicted, and counted."""
    lru: ByteLru[str, str] = ByteLru(2 * (100 + ENTRY_OVERHEAD_BYTES))
    lru.put("a", "A", 100)
    lru.put("b", "B", 100)
    assert lru.get("a") == "A"
    lru.put("c", "C", 100)
    assert [lru.get(key) for key in "abc"] == ["A", None, "C"]
    assert lru.evictions == 1


def test_a_value_above_the_bound_is_not_kept_and_evicts_nothing() -> None:
    """One huge value doesn't empty the cache, and the older value of its key is not served any more."""
    lru: ByteLru[str, str] = ByteLru(1_000 + ENTRY_OVERHEAD_BYTES)
    assert lru.put("a", "old", 10)
    assert not lru.put("b", "huge", 1_001)
    assert lru.get("a") == "old"
    assert not lru.put("a", "huge", 1_001)
    assert lru.get("a") is None
    assert (lru.held_bytes, lru.evictions) == (0, 0)


def test_no_room_keeps_nothing() -> None:
    """A bound of 0 switches the tier off; a negative one is refused."""
    lru: ByteLru[str, str] = ByteLru(0)
    assert not lru.put("a", "A", 0)
    with pytest.raises(ValueError, match="-1"):
        ByteLru(-1)


@given(
    st.integers(0, 5_000),
    st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans(), st.integers(0, 2_000)), max_size=50),
)
def test_the_bound_holds_and_the_sum_is_right(max_bytes: int, steps: list[tuple[str, bool, int]]) -> None:
    """After any sequence of puts and pops, the charge is the sum of what is held and within the bound."""
    lru: ByteLru[str, int] = ByteLru(max_bytes)
    for key, put, nbytes in steps:
        if put:
            lru.put(key, nbytes, nbytes)
        else:
            lru.pop(key)
        held = [value for key in "abcdef" if (value := lru.get(key)) is not None]
        assert lru.held_bytes == sum(held) + ENTRY_OVERHEAD_BYTES * len(held) <= max_bytes
        assert len(lru) == len(held)
