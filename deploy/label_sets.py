"""Label sets under an id: definitions in the store, which never expire there, and in memory for a moment.

A definition is data, not cache: what the store loses is lost. Its id is a hash of its labels, so who posts a set again
gets the same id. Its value is one JSON object, version 1:

    {"version": 1, "checksum": "…", "definition": {"name": "…" | null, "labels": ["…" | {"name", "description"}, …]}}

The checksum is a blake2b over the length of the key, the key, and the definition as compact JSON with sorted keys. The
labels must also give the id that they are kept under, so a value of another key, or of another program, is found out
whoever wrote it. A value that can't be read counts as absent, is logged, and is overwritten when the set is posted
again; one of a later version, as a rolling update may leave, is not counted as absent.
"""

import asyncio
import hashlib
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from deploy.label_cache.background import detached
from deploy.label_cache.keys import tenant_hash
from deploy.label_cache.lru import ByteLru
from deploy.label_cache.store import Store, StoreError
from tokenalign.errors import InputError, Loc, TokenAlignError
from tokenalign.labels import Label, LabelSet, label_set_id

VERSION = 1
ID_FORM = re.compile(r"[0-9a-f]{32}", re.ASCII)
LABEL_BYTES = 300
"""Charged for each description in memory beside its characters: Label, tuples, headers, as `sys.getsizeof` has them."""

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


class UnknownLabelSetError(TokenAlignError):
    """No label set has this id, for this tenant at least; `loc` is where in the request the id stands."""

    def __init__(self, set_id: str, loc: Loc = ()) -> None:
        super().__init__(set_id, loc)
        self.set_id, self.loc = set_id, loc

    def __str__(self) -> str:
        return (
            f"no label set has the id {self.set_id[:40]!r}; it was deleted, or the store lost it: "
            "send its labels to POST /v1/label-sets again, which gives the same id"
        )


class LabelSetsUnavailableError(TokenAlignError):
    """The store of label sets can't be asked. `passing`: it may be worth to send the request again."""

    def __init__(self, message: str, *, passing: bool) -> None:
        super().__init__(message)
        self.passing = passing


class NewerDefinitionError(LabelSetsUnavailableError):
    """The definition in the store is of a version that this program can't read."""


class PinnedLabelSetError(TokenAlignError):
    """The label set is named in the settings, so it can't be deleted."""


class _DamagedError(Exception):
    """A value is no definition for its key."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A label set as it was first posted: its labels in that caller's order, which ties are broken by."""

    set_id: str
    name: str | None
    labels: LabelSet

    @classmethod
    def of(cls, labels: LabelSet, name: str | None) -> "Definition":
        """The definition of `labels`, under the id that these have."""
        return cls(label_set_id(labels), name, labels)

    def json(self) -> dict[str, Any]:
        """Name and labels in the forms that a request takes."""
        return {"name": self.name, "labels": [_label_json(label) for label in self.labels.labels]}


@dataclass(slots=True)
class LabelSetStats:
    """Plain counters of one replica, of look-ups by where they ended, and of what was done."""

    memory_hits: int = 0
    store_hits: int = 0
    unknown: int = 0
    damaged: int = 0
    """Values that were no definition; each also counts as unknown."""
    stale_hits: int = 0
    """Look-ups that memory answered because the store could not."""
    unavailable: int = 0
    defined: int = 0
    deleted: int = 0


@dataclass(slots=True)
class _Held:
    definition: Definition
    fresh_until: float


class LabelSets:
    """The label sets of one replica: a bounded memory in front of the store.

    What is in memory is used for `memory_ttl_s` without asking the store, so another replica's delete is heeded after
    that at the latest. After it the store is asked again, and only when it does not answer is the held one used on.
    Pinned sets are known whatever the store says, to every tenant.
    """

    def __init__(
        self,
        store: Store | None,
        *,
        namespace: str = "tokenalign",
        memory_bytes: int = 16 * 2**20,
        memory_ttl_s: float = 10.0,
        max_bytes: int = 2**20,
        store_budget_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Label sets in `store`; None where the settings name none: then nothing but pinned sets is known.

        max_bytes: of one definition in the store, where it takes room until it is deleted
        store_budget_s: of each question to the store
        """
        self.stats = LabelSetStats()
        self._store = store
        self._namespace = namespace
        self._memory: ByteLru[str, _Held] = ByteLru(memory_bytes)
        self._memory_ttl_s = memory_ttl_s
        self._max_bytes = max_bytes
        self._store_budget_s = store_budget_s
        self._clock = clock
        self._pinned: dict[str, Definition] = {}
        self._asking: dict[str, asyncio.Task[Definition | None]] = {}
        self._failing: str | None = None

    def pin(self, definition: Definition) -> None:
        """Has the set known to this replica for as long as it lives."""
        self._pinned[definition.set_id] = definition

    async def get(self, set_id: str, *, tenant: str | None = None) -> Definition:
        """The definition with that id.

        Raises `UnknownLabelSetError`, or `LabelSetsUnavailableError` when only the store could tell and does not.
        """
        if set_id in self._pinned:
            self.stats.memory_hits += 1
            return self._pinned[set_id]
        self._opened()
        key = self._key(set_id, tenant)
        held = self._memory.get(key)
        if held is not None and self._clock() < held.fresh_until:
            self.stats.memory_hits += 1
            return held.definition
        try:
            found = await self._stored(key, set_id)
        except LabelSetsUnavailableError:
            if held is None:
                raise
            self.stats.stale_hits += 1
            # Not asked again for a while, or each request would wait for a store that does not answer.
            held.fresh_until = self._clock() + self._memory_ttl_s
            return held.definition
        if found is None:
            raise UnknownLabelSetError(set_id)
        return found

    async def known(self, definition: Definition, *, tenant: str | None = None) -> Definition | None:
        """What the store, asked anew, has under the same id; name and order of a known set stay as they are.

        Raises `LabelSetsUnavailableError`, and `InputError` for a new definition above `max_bytes`.
        """
        if definition.set_id in self._pinned:
            return self._pinned[definition.set_id]
        self._encoded(definition, tenant)
        try:
            return await self._stored(self._key(definition.set_id, tenant), definition.set_id)
        except NewerDefinitionError:
            return None

    async def keep(self, definition: Definition, *, tenant: str | None = None) -> None:
        """Returns once every replica can know the definition; one with the same id is overwritten.

        Raises what `known` raises.
        """
        key, value = self._key(definition.set_id, tenant), self._encoded(definition, tenant)
        await self._ask(self._opened().set_forever(key, value))
        self.stats.defined += 1
        self._hold(key, definition, len(value))

    async def delete(self, set_id: str, *, tenant: str | None = None) -> None:
        """Returns once no definition with that id is in the store, whether or not there was one.

        Raises `LabelSetsUnavailableError`, and `PinnedLabelSetError` for a set of the settings.
        """
        if set_id in self._pinned:
            raise PinnedLabelSetError(
                f"the label set {set_id} is named in the settings (label_sets.warm), so every replica knows it; "
                "remove it there"
            )
        store = self._opened()
        if not ID_FORM.fullmatch(set_id):
            return
        key = self._key(set_id, tenant)
        self.stats.deleted += await self._ask(store.delete(key))
        self._memory.pop(key)

    async def close(self) -> None:
        """Closes the store."""
        if self._store is not None:
            try:
                await self._store.close()
            except StoreError as error:
                logger.warning("the store of label sets could not be closed: %s", error)

    def _key(self, set_id: str, tenant: str | None) -> str:
        """Apart from the cache's keys, which carry a schema and a fingerprint: definitions outlive both."""
        owner = "" if tenant is None else f"{tenant_hash(self._namespace, tenant)}:"
        return f"{self._namespace}:data:{owner}set:{set_id}"

    def _opened(self) -> Store:
        if self._store is None:
            raise LabelSetsUnavailableError(
                "label sets are kept in the label store, and the settings name none (label_cache.url is none); "
                "set it to embedded or a redis:// URL, or send the labels with each request",
                passing=False,
            )
        return self._store

    def _encoded(self, definition: Definition, tenant: str | None) -> bytes:
        value = _encode(self._key(definition.set_id, tenant), definition)
        if len(value) > self._max_bytes:
            raise InputError(
                f"the label set takes {len(value):,} bytes, at most {self._max_bytes:,} are kept "
                "(label_sets.max_bytes); shorten its descriptions, or send the labels with each request",
                ("labels",),
            )
        return value

    def _hold(self, key: str, definition: Definition, value_bytes: int) -> None:
        charge = value_bytes + LABEL_BYTES * len(definition.labels.descriptions)
        self._memory.put(key, _Held(definition, self._clock() + self._memory_ttl_s), charge)

    async def _stored(self, key: str, set_id: str) -> Definition | None:
        """What the store has; requests that ask for the same at once share its answer."""
        if not ID_FORM.fullmatch(set_id):
            self.stats.unknown += 1
            return None
        task = self._asking.get(key)
        if task is None:
            task = detached(self._fetch(self._opened(), key, set_id))
            self._asking[key] = task
            task.add_done_callback(lambda done: self._answered(key, done))
        return await asyncio.shield(task)

    def _answered(self, key: str, task: "asyncio.Task[Definition | None]") -> None:
        del self._asking[key]
        if not task.cancelled():
            task.exception()  # its waiters have it; asked for here in case that all of them left

    async def _fetch(self, store: Store, key: str, set_id: str) -> Definition | None:
        [value] = await self._ask(store.get_many([key]))
        if value is not None:
            try:
                definition = await asyncio.to_thread(_decode, key, value, set_id, self._max_bytes)
            except _DamagedError as error:
                self.stats.damaged += 1
                logger.warning("the label set %s counts as unknown: its value in the store %s", set_id, error)
            else:
                self.stats.store_hits += 1
                self._hold(key, definition, len(value))
                return definition
        self.stats.unknown += 1
        self._memory.pop(key)
        return None

    async def _ask(self, answer: Awaitable[ResultT]) -> ResultT:
        try:
            async with asyncio.timeout(self._store_budget_s):
                answered = await answer
        except (TimeoutError, StoreError) as error:
            self.stats.unavailable += 1
            reason = error.reason if isinstance(error, StoreError) else "timeout"
            if reason != self._failing:  # once, and not for each request while it lasts
                logger.warning("the store of label sets fails (%s): %s", reason, error)
            self._failing = reason
            raise LabelSetsUnavailableError(
                f"the store of label sets does not answer as it should ({reason}); "
                "send the request again, or its labels instead of an id",
                passing=True,
            ) from error
        self._failing = None
        return answered


def _label_json(label: Label) -> str | dict[str, Any]:
    if label.descriptions == (label.name,):
        return label.name
    return {"name": label.name, "description": list(label.descriptions)}


def _encode(key: str, definition: Definition) -> bytes:
    body = definition.json()
    return json.dumps({"version": VERSION, "checksum": _checksum(key, body), "definition": body}).encode()


def _decode(key: str, value: bytes, set_id: str, max_bytes: int) -> Definition:
    """The definition that `_encode` wrote for `key`, every part of it checked as if a caller had sent it."""
    if len(value) > max_bytes:
        raise _DamagedError(f"has {len(value):,} bytes, more than label_sets.max_bytes allows")
    try:
        found = json.loads(value)
        version, checksum, body = found["version"], found["checksum"], found["definition"]
        expected = _checksum(key, body)
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise _DamagedError("is no definition at all") from error
    if isinstance(version, int) and version > VERSION:
        raise NewerDefinitionError(
            f"the label set {set_id} has version {version}, this program reads {VERSION}; "
            "send the request again when the rollout is through, or the labels to POST /v1/label-sets again",
            passing=True,
        )
    if version != VERSION or checksum != expected:
        raise _DamagedError("has another checksum than it says, or another version")
    try:
        labels = LabelSet.of(body["labels"], min_labels=1, max_labels=len(value), max_chars=len(value))
        name = body["name"]
    except (InputError, KeyError, TypeError) as error:
        raise _DamagedError(f"holds no labels: {error}") from error
    if label_set_id(labels) != set_id or not (name is None or isinstance(name, str)):
        raise _DamagedError("is of another set")
    return Definition(set_id, name, labels)


def _checksum(key: str, body: object) -> str:
    data = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    name = key.encode()
    return hashlib.blake2b(len(name).to_bytes(8, "little") + name + data, digest_size=16).hexdigest()
