"""Callers of an application under fault: each text's answer is known beforehand, and each request ends as some kind."""

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

import httpx
import numpy as np
from numpy.typing import NDArray

from tokenalign import TokenAlignClassifier

CLIENT_TIMEOUT_S = 90.0  # beyond everything that the service itself limits
CALLERS = 128  # at most under way, so that a service that hangs is not asked for ever more

TOPICS = (
    "a card payment",
    "a cash machine",
    "a lost parcel",
    "the weather",
    "a football match",
    "a recipe for bread",
    "a broken phone",
    "a train to Paris",
)
MOODS = ("An angry", "A happy", "A puzzled", "A short", "A formal", "A worried")
TEXTS = [f"{mood} message about {topic}." for mood, topic in itertools.product(MOODS, TOPICS)]
LABELS = ["card payment", "cash withdrawal", "parcel delivery", "weather", "sport", "cooking", "complaint", "thanks"]
TOLERANCE = 0.1  # of a logit: rows travel as 16-bit floats; the texts are five times as far apart
OK = "ok"
WRONG = "wrong answer"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended: "ok", "wrong answer", the status and `error_type` of ours, or what the client saw."""

    kind: str
    at_s: float  # of the monotonic clock
    took_s: float


class Known:
    """The answer to every text, so that one that went to the wrong caller is seen.

    logits: `[texts, labels]`
    """

    def __init__(self, logits: NDArray[np.float64]) -> None:
        self._logits = logits
        apart = np.abs(logits[:, None] - logits[None]).max(axis=2) + np.eye(len(logits))
        assert apart.min() > 2 * TOLERANCE, "two texts have answers too much alike to tell whose is whose"

    @classmethod
    def by_the_library(cls) -> "Known":
        """Computed in this process."""
        classifier = TokenAlignClassifier.from_pretrained(None, device="cpu")
        found = classifier(TEXTS, LABELS, return_logits=True)
        return cls(np.array([[one["logits"][label] for label in LABELS] for one in found]))

    def fits(self, text: int, body: bytes) -> bool:
        """Whether the body of a response is the answer to that text."""
        [result] = json.loads(body)["results"]
        logits = {score["label"]: score["logit"] for score in result["scores"]}
        return bool(np.abs(np.array([logits[label] for label in LABELS]) - self._logits[text]).max() <= TOLERANCE)


@dataclass(slots=True)
class Load:
    """Requests at a steady rate, and how those that ended did."""

    url: str
    known: Known
    endings: list[Ending] = field(default_factory=list)
    started: int = 0
    under_way: int = 0

    def kinds(self, since_s: float = 0.0, until_s: float = float("inf")) -> Counter[str]:
        """How many requests ended in which way, of those that ended in that time."""
        return Counter(e.kind for e in self.endings if since_s <= e.at_s <= until_s)

    def recovered_after_s(self, fault_s: float) -> float:
        """From the fault until the last request that failed had ended; 0 where none failed."""
        return max((e.at_s - fault_s for e in self.endings if e.kind != OK and e.at_s >= fault_s), default=0.0)

    def silence_s(self, fault_s: float) -> float:
        """The longest time without a good answer after the fault."""
        good = [fault_s, *(e.at_s for e in self.endings if e.kind == OK and e.at_s >= fault_s)]
        return max((later - earlier for earlier, later in itertools.pairwise(good)), default=float("inf"))

    async def ask(self, client: httpx.AsyncClient, text: int) -> str:
        """Sends one text, and writes down how that ended."""
        started = time.monotonic()
        self.started += 1
        self.under_way += 1
        try:
            kind = await self._kind(client, text)
        finally:
            self.under_way -= 1
        now = time.monotonic()
        self.endings.append(Ending(kind, now, now - started))
        return kind

    async def _kind(self, client: httpx.AsyncClient, text: int) -> str:
        body = {"texts": [TEXTS[text]], "labels": LABELS, "return_logits": True}
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                response = await client.post(f"{self.url}/v1/classify", json=body)
        except TimeoutError:
            return "no answer"
        except httpx.TransportError as error:
            return type(error).__name__
        if response.status_code == 200:
            return OK if self.known.fits(text, response.content) else WRONG
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return f"{response.status_code} {response.json()['error_type']}"
        return f"{response.status_code} of the proxy"

    @contextlib.asynccontextmanager
    async def at(self, rate_hz: float) -> AsyncIterator["Load"]:
        """Sends at that rate inside of the `with`; leaving it waits for the answers that are still to come."""
        limits = httpx.Limits(max_connections=CALLERS, max_keepalive_connections=CALLERS)
        async with httpx.AsyncClient(timeout=CLIENT_TIMEOUT_S, limits=limits, trust_env=False) as client:
            requests: set[asyncio.Task[str]] = set()

            async def send() -> None:
                for text in itertools.cycle(range(len(TEXTS))):
                    if len(requests) < CALLERS:
                        request = asyncio.create_task(self.ask(client, text))
                        requests.add(request)
                        request.add_done_callback(requests.discard)
                    await asyncio.sleep(1 / rate_hz)

            sender = asyncio.create_task(send())
            try:
                yield self
            finally:
                sender.cancel()
                await asyncio.wait({sender})
                if requests:
                    await asyncio.wait(requests)

    async def good(self, count: int, patience_s: float = 240.0) -> None:
        """Returns once so many requests in a row ended well, those after now."""
        first = len(self.endings)
        async with asyncio.timeout(patience_s):
            while not _ends_well(self.endings[first:], count):  # noqa: ASYNC110  what other processes bring about
                await asyncio.sleep(0.05)

    async def busy(self, requests: int, patience_s: float = 60.0) -> None:
        """Returns once so many requests are under way."""
        async with asyncio.timeout(patience_s):
            while self.under_way < requests:  # noqa: ASYNC110  as above
                await asyncio.sleep(0.005)


def _ends_well(endings: Iterable[Ending], count: int) -> bool:
    last = list(endings)[-count:]
    return len(last) == count and all(ending.kind == OK for ending in last)
