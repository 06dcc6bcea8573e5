"""What a label cache did, as plain counters."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Saving = Literal["memory", "list", "labels", "flight", "replica"]
"""Where a description came from that cost no encoding: `flight` is another request of this replica that was fetching
it at the time, `replica` another replica that was encoding it."""


@dataclass
class TierStats:
    """What one tier did since the start. The memory and list tiers count lists, the label tier counts descriptions."""

    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    """By reason: absent, a `CodecReason`, or the `StoreReason` that kept us from looking."""
    read_bytes: int = 0
    written_bytes: int = 0
    held_bytes: int = 0
    evictions: int = 0
    """Of memory: lists that had to go. Of the store: entries that were kept, and that a refresh found gone."""


@dataclass
class CacheStats:
    """Plain counters of one replica; all but `held_bytes` only grow."""

    memory: TierStats = field(default_factory=TierStats)
    lists: TierStats = field(default_factory=TierStats)
    labels: TierStats = field(default_factory=TierStats)
    store_errors: Counter[str] = field(default_factory=Counter)
    """Failed reads and writes of the store, by `StoreReason`."""
    store_round_trips: int = 0
    shared_flights: int = 0
    """Requests that waited for another's look-up of the same list."""
    encode_calls: int = 0
    encoded_descriptions: int = 0
    encodings_saved: Counter[str] = field(default_factory=Counter)
    """Descriptions that cost no encoding, by `Saving`."""
    lock_waits: int = 0
    """Descriptions that another replica was encoding when they were needed here."""
    lock_takeovers: int = 0
    """Of those, the ones whose encoding ended without an entry: the other replica failed, or was killed."""
    lock_timeouts: int = 0
    """Of those, the ones that were not there within `lock_wait_s`, and were encoded here."""
    lock_wait_s: float = 0.0
    """Seconds that requests spent so."""
    refreshes: int = 0
    skipped_writes: int = 0
