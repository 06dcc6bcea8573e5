"""A mapping that forgets what was used least recently, bounded in bytes."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

ENTRY_OVERHEAD_BYTES = 512
"""Charged for each entry beside its value: key, list node, array objects; the sum of `sys.getsizeof`, rounded up."""


class ByteLru(Generic[Key, Value]):
    """At most `max_bytes` of values, each charged what `put` says plus `ENTRY_OVERHEAD_BYTES`."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; give 0 to keep nothing, or more")
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.evictions = 0
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        """The value of `key`, from now on the most recently used; None when there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Key, value: Value, nbytes: int) -> bool:
        """Whether `value` is kept: False, and `key` is forgotten, when it alone is above the bound."""
        self.pop(key)
        charge = nbytes + ENTRY_OVERHEAD_BYTES
        if charge > self.max_bytes:
            return False
        self._entries[key] = (value, charge)
        self.held_bytes += charge
        while self.held_bytes > self.max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.held_bytes -= freed
            self.evictions += 1
        return True

    def pop(self, key: Key) -> None:
        """Forgets `key`, if it is there; not counted as an eviction."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.held_bytes -= entry[1]
