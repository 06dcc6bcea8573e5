"""What a label cache did, as plain counters."""

from collections import Counter
from dataclasses import dataclass, field


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


@dataclass
class CacheStats:
    """Plain counters of one cache; all but `held_bytes` only grow."""

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
    refreshes: int = 0
    skipped_writes: int = 0
