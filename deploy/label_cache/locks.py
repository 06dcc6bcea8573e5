"""Locks that tell replicas which of them encodes a label that all of them miss.

They save work and nothing else: whoever can't have one, or not soon, encodes for itself, and entries are the same
whoever wrote them.

No order of locking is needed against deadlock, because nobody waits for a lock while others wait for what it holds: a
lock is tried, not waited for, and what was taken is encoded, written and freed before the holder looks for the rest.
"""

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

from deploy.label_cache.access import StoreAccess
from deploy.label_cache.background import detached
from deploy.label_cache.store import StoreError

FIRST_PAUSE_S = 0.01
LAST_PAUSE_S = 0.2
"""Between two looks at what another replica encodes: a tenth of what it takes at most, once it takes long."""

_BEATS = 3  # extensions of a lock within its life, so that one that comes late doesn't lose it


@dataclass(frozen=True, slots=True)
class LockTimes:
    """ttl_s: how long a lock outlives the holder that was killed
    wait_s: how long one request waits for other replicas
    """

    ttl_s: float
    wait_s: float


class Turn:
    """One request's place among those that want to encode the same labels. Its locks hold a random token."""

    def __init__(self, access: StoreAccess, times: LockTimes, *, uniform: Callable[[], float] = random.random) -> None:
        self._access = access
        self._times = times
        self._uniform = uniform
        self._token = secrets.token_hex(16).encode()
        self._held: set[str] = set()
        self._give_up_at = asyncio.get_running_loop().time() + times.wait_s
        self._pause_s = FIRST_PAUSE_S
        self._paused = False

    async def take(self, locks: Sequence[str], deadline: float) -> set[str]:
        """Those of `locks` that are ours now."""
        asked = [lock for lock in locks if lock not in self._held]
        self._held.update(asked)  # for all we know, in case that the answer is lost
        if asked:
            taken = await self._access.lock(dict.fromkeys(asked, self._token), self._times.ttl_s, deadline)
            self._held.difference_update(lock for lock, ours in zip(asked, taken, strict=True) if not ours)
        return self._held.intersection(locks)

    async def pause(self) -> bool:
        """Whether there is time for another look, after a pause that grows, with jitter; False once it is over.

        There is always time for one, since while we encoded our part the others may have finished theirs.
        """
        left_s = self._give_up_at - asyncio.get_running_loop().time()
        if left_s <= 0 and self._paused:
            return False
        self._paused = True
        await asyncio.sleep(max(0.0, min(self._pause_s * (0.5 + self._uniform() / 2), left_s)))
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        return True

    async def look(self, entries: Sequence[str], locks: Sequence[str]) -> tuple[list[bytes | None], set[str]]:
        """The value of each entry, and those of `locks` that can be taken; one round trip."""
        values = await self._access.read([*entries, *locks], self._access.deadline())
        held = values[len(entries) :]
        # One that has our token was taken by a command that was sent again, after the first answer had been lost.
        self._held.update(lock for lock, token in zip(locks, held, strict=True) if token == self._token)
        free = {lock for lock, token in zip(locks, held, strict=True) if token is None}
        return values[: len(entries)], free | self._held.intersection(locks)

    @contextlib.asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        """Keeps the locks alive meanwhile, however long it takes."""
        beat = detached(self._beat(list(self._held))) if self._held else None
        try:
            yield
        finally:
            if beat is not None:
                beat.cancel()

    def hand_over(self, locks: Iterable[str] | None = None) -> list[str]:
        """Those of `locks`, or of all, that are ours, for whoever frees them."""
        chosen = self._held.copy() if locks is None else self._held.intersection(locks)
        self._held -= chosen
        return sorted(chosen)

    async def free(self, locks: Sequence[str]) -> None:
        """Frees those that still hold our token; a store that fails frees them when their life ends."""
        if locks:
            with contextlib.suppress(StoreError):
                await self._access.unlock(dict.fromkeys(locks, self._token))

    async def _beat(self, locks: list[str]) -> None:
        """Extends the locks' lives until it is cancelled, or the store fails.

        One that was lost meanwhile, and is another's now, lives a little longer: no harm, as its holder frees it.
        """
        with contextlib.suppress(StoreError):
            while True:
                await asyncio.sleep(self._times.ttl_s / _BEATS)
                await self._access.extend(locks, self._times.ttl_s)
