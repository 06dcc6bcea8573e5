"""What an ingress counts, as plain numbers, and what they say as metrics."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from deploy.label_sets import LabelSetStats
from deploy.metrics import (
    BATCH_RETRIES,
    LABEL_SET_CHANGES,
    LABEL_SET_DAMAGED,
    LABEL_SET_LOOKUPS,
    TEXT_TOKENS,
    TEXTS,
    TRUNCATED_TEXTS,
)
from deploy.telemetry import Reading
from tokenalign.text import Windowed


@dataclass(slots=True)
class IngressStats:
    """What one replica did with texts since it started; `retries` by what befell the first try of a batch."""

    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    retries: Counter[str] = field(default_factory=Counter)

    def count(self, windowed: Sequence[Windowed]) -> None:
        """Adds the texts of a request."""
        self.texts += len(windowed)
        for windows in windowed:
            self.tokens += len(windows.tokenized.tokens.values)
            self.truncated += any(cut is not None for cut in windows.tokenized.truncations)

    def readings(self) -> Iterator[Reading]:
        """What has been counted."""
        yield Reading(TEXTS, self.texts)
        yield Reading(TEXT_TOKENS, self.tokens)
        yield Reading(TRUNCATED_TEXTS, self.truncated)
        for reason, count in self.retries.items():
            yield Reading(BATCH_RETRIES, count, (reason,))


def label_set_readings(stats: LabelSetStats) -> Iterator[Reading]:
    """What was counted of label sets."""
    for result, count in (
        ("memory", stats.memory_hits),
        ("store", stats.store_hits),
        ("stale_memory", stats.stale_hits),
        ("unknown", stats.unknown),
        ("store_failed", stats.unavailable),
    ):
        yield Reading(LABEL_SET_LOOKUPS, count, (result,))
    yield Reading(LABEL_SET_CHANGES, stats.defined, ("defined",))
    yield Reading(LABEL_SET_CHANGES, stats.deleted, ("deleted",))
    yield Reading(LABEL_SET_DAMAGED, stats.damaged)
