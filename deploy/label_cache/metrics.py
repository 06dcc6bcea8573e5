"""The label cache's metrics: names, and what they say now."""

from collections.abc import Iterator

from deploy.label_cache.breaker import BreakerStore
from deploy.label_cache.stats import CacheStats
from deploy.label_cache.store import Store
from deploy.telemetry import Metric, Reading

_BREAKER_STATES = ("closed", "open", "half_open")


def _counter(name: str, description: str, *tag_keys: str) -> Metric:
    return Metric(f"tokenalign_label_cache_{name}_total", "counter", description, tag_keys)


HITS = _counter("hits", "Look-ups that found what they looked for: lists in memory and list, labels in label.", "tier")
MISSES = _counter("misses", "Look-ups that did not, by what was in the way.", "tier", "reason")
READ_BYTES = _counter("read_bytes", "Bytes of entries read from the store.", "tier")
WRITTEN_BYTES = _counter("written_bytes", "Bytes of entries written to the store.", "tier")
EVICTIONS = _counter("evictions", "Lists that memory had no room for, and entries that the store had lost.", "tier")
HELD_BYTES = Metric("tokenalign_label_cache_held_bytes", "gauge", "Bytes of the lists in memory.")
STORE_ERRORS = _counter("store_errors", "Reads and writes of the store that failed.", "reason")
ROUND_TRIPS = _counter("store_round_trips", "Questions to the store.")
SAVED = _counter("encodings_saved", "Labels that cost no encoding, by where they came from.", "source")
ENCODED = _counter("encoded_labels", "Labels that were encoded.")
ENCODE_CALLS = _counter("encode_calls", "Questions to the encoder.")
SHARED_FLIGHTS = _counter("shared_flights", "Requests that waited for another's look-up of the same list.")
LOCK_WAITS = _counter("lock_waits", "Labels that another replica was encoding when they were needed.")
LOCK_TAKEOVERS = _counter("lock_takeovers", "Labels that the other replica failed to bring.")
LOCK_TIMEOUTS = _counter("lock_timeouts", "Labels that the other replica did not bring in time.")
LOCK_WAIT_SECONDS = _counter("lock_wait_seconds", "Time that requests waited for other replicas.")
REFRESHES = _counter("refreshes", "Lists in use whose entries had their lives extended.")
SKIPPED_WRITES = _counter("skipped_writes", "Writes that were dropped because too many were under way.")
BREAKER_STATE = Metric(
    "tokenalign_label_store_breaker_state", "gauge", "1 for the state that the store's breaker is in.", ("state",)
)
BREAKER_OPENED = Metric(
    "tokenalign_label_store_breaker_opened_total", "counter", "How often the store was given up for a while."
)
BREAKER_REFUSED = Metric(
    "tokenalign_label_store_breaker_refused_total", "counter", "Questions that the store was spared meanwhile."
)
LOOKUP_SECONDS = Metric(
    "tokenalign_label_cache_lookup_seconds",
    "histogram",
    "Time until a request had its label rows, by the furthest place that was needed.",
    ("source",),
    (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


def cache_readings(stats: CacheStats) -> Iterator[Reading]:
    """What the cache's counters say."""
    for name, tier in (("memory", stats.memory), ("list", stats.lists), ("label", stats.labels)):
        yield Reading(HITS, tier.hits, (name,))
        for reason, count in tier.misses.items():
            yield Reading(MISSES, count, (name, reason))
        yield Reading(READ_BYTES, tier.read_bytes, (name,))
        yield Reading(WRITTEN_BYTES, tier.written_bytes, (name,))
        yield Reading(EVICTIONS, tier.evictions, (name,))
    yield Reading(HELD_BYTES, stats.memory.held_bytes)
    for reason, count in stats.store_errors.items():
        yield Reading(STORE_ERRORS, count, (reason,))
    for source, count in stats.encodings_saved.items():
        yield Reading(SAVED, count, (source,))
    for metric, value in (
        (ROUND_TRIPS, stats.store_round_trips),
        (ENCODED, stats.encoded_descriptions),
        (ENCODE_CALLS, stats.encode_calls),
        (SHARED_FLIGHTS, stats.shared_flights),
        (LOCK_WAITS, stats.lock_waits),
        (LOCK_TAKEOVERS, stats.lock_takeovers),
        (LOCK_TIMEOUTS, stats.lock_timeouts),
        (LOCK_WAIT_SECONDS, stats.lock_wait_s),
        (REFRESHES, stats.refreshes),
        (SKIPPED_WRITES, stats.skipped_writes),
    ):
        yield Reading(metric, value)


def store_readings(store: Store | None) -> Iterator[Reading]:
    """What the store's breaker says, where it has one."""
    if not isinstance(store, BreakerStore):
        return
    state = store.state
    for name in _BREAKER_STATES:
        yield Reading(BREAKER_STATE, float(name == state), (name,))
    yield Reading(BREAKER_OPENED, store.times_opened)
    yield Reading(BREAKER_REFUSED, store.refused)
