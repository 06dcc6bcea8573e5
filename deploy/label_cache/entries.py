"""Rows to entries and back, off the event loop, with what is refused counted."""

import asyncio
import logging
from collections.abc import Sequence

from deploy.label_cache.codec import CodecError, LabelRows, decode_rows, encode_rows
from deploy.label_cache.stats import TierStats

logger = logging.getLogger(__name__)


class Entries:
    """The entries of one width and one secret."""

    def __init__(self, width: int, secret: bytes | None) -> None:
        self.width = width
        self._secret = secret

    async def decode(
        self, keys: Sequence[str], entries: Sequence[bytes | None], descriptions: int, tier: TierStats, *, first: bool
    ) -> list[LabelRows | None]:
        """The rows of each entry; None, counted, where it is absent or not intact: then it will be written again.

        first: False when the same keys were read before and were counted as missing
        """
        decoded = await asyncio.to_thread(
            lambda: [self._decode_one(key, data, descriptions) for key, data in zip(keys, entries, strict=True)]
        )
        for key, data, rows in zip(keys, entries, decoded, strict=True):
            tier.read_bytes += len(data or b"")
            if not first:
                continue
            if isinstance(rows, LabelRows):
                tier.hits += 1
                continue
            reason = "absent" if rows is None else rows.reason
            tier.misses[reason] += 1
            if rows is not None and tier.misses[reason] == 1:
                logger.warning("refused the cache entry %s, and will count others like it: %s", key, rows)
        return [rows if isinstance(rows, LabelRows) else None for rows in decoded]

    async def encode(self, key: str, rows: LabelRows) -> bytes:
        """The entry of a whole list."""
        return await asyncio.to_thread(encode_rows, key, rows, self._secret)

    async def through_codec(self, keys: Sequence[str], rows: LabelRows) -> tuple[list[LabelRows], dict[str, bytes]]:
        """The rows of each label as its entry will give them back, and the entries.

        Each label by itself, since whether one fits float16 must not depend on the others.
        """
        return await asyncio.to_thread(self._through_codec, keys, rows)

    def _through_codec(self, keys: Sequence[str], rows: LabelRows) -> tuple[list[LabelRows], dict[str, bytes]]:
        entries = {key: encode_rows(key, label, self._secret) for key, label in zip(keys, rows.split(), strict=True)}
        labels = [decode_rows(key, entries[key], self._secret, width=self.width, descriptions=1) for key in keys]
        return labels, entries

    def _decode_one(self, key: str, data: bytes | None, descriptions: int) -> LabelRows | CodecError | None:
        if data is None:
            return None
        try:
            return decode_rows(key, data, self._secret, width=self.width, descriptions=descriptions)
        except CodecError as error:
            return error
