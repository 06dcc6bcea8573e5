"""The load generator: closed loop (so many callers) or open loop (so many arrivals a second), on the loopback.

    python -m tests.benchmarks.generator    # a plan as one JSON line in, events and the outcome as JSON lines out

One process, one thread, sockets that are kept, requests built beforehand: it takes little of the cores.
In an open loop arrivals follow a schedule that was drawn before; the time of a request counts from when it was due, so
that neither a slow answer nor a slow generator hides the wait of those behind it. It imports the standard library only.
"""

import gc
import json
import random
import re
import resource
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.statistics_of import percentile

HOST = "127.0.0.1"
DRAIN_S = 45.0  # past the service's own deadline, so that nothing is left unanswered that would be answered
MAX_CONNECTIONS = 3_900  # HAProxy's own limit is 4,096
RECEIVE_BYTES = 262_144

_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)")


class GeneratorError(Exception):
    """The load could not be made as it was planned."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send.

    extra: keys of each body besides its text or texts, such as the labels
    connections: callers that wait for their answers (closed loop), or None
    rate: arrivals a second (open loop), or None
    warm_s: left out of the outcome, before the window of `window_s`
    start: the first text
    """

    port: int
    path: str
    texts: list[str]
    texts_per_request: int
    extra: dict[str, Any]
    connections: int | None = None
    rate: float | None = None
    warm_s: float = 1.0
    window_s: float = 5.0
    start: int = 0
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """What came back: in a closed loop of what was answered within the window, in an open one of what was due in it.

    statuses: answers by status
    latency_ms: seconds from send (closed) or due time (open) to the last byte, by status: p50, p99, mean, max
    late_p99_ms: how late the generator itself sent what was due
    waited: arrivals that found no free connection
    unanswered: requests without an answer at the end
    """

    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    latency_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    late_p99_ms: float = 0.0
    waited: int = 0
    unanswered: int = 0
    connections: int = 0
    failures: list[str] = field(default_factory=list)


class ResponseReader:
    """Takes the bytes of one HTTP/1.1 response after the other; knows lengths and chunks, not what is in them."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._body_at = -1
        self._length = -1
        self._status = 0
        self.closes = False

    @property
    def body(self) -> bytes:
        """What came of the body so far."""
        return bytes(self._held[self._body_at :])

    def feed(self, data: bytes) -> int | None:
        """The status once the response is whole."""
        self._held += data
        if self._body_at < 0:
            end = self._held.find(b"\r\n\r\n")
            if end < 0:
                return None
            self._read_head(bytes(self._held[:end]).lower())
            self._body_at = end + 4
        if self._length >= 0:
            return self._status if len(self._held) - self._body_at >= self._length else None
        # JSON holds no bare line end, so the last chunk can't be mistaken for content.
        return self._status if self._held.endswith(b"0\r\n\r\n") else None

    def restart(self) -> None:
        """Forgets the response, for the next one on the same connection."""
        self._held.clear()
        self._body_at = self._length = -1

    def _read_head(self, head: bytes) -> None:
        if not head.startswith(b"http/1."):
            raise GeneratorError(f"no HTTP/1.1 response: {head[:40]!r}")
        self._status = int(head[9:12])
        self.closes = b"\r\nconnection: close" in head
        if found := _LENGTH.search(head):
            self._length = int(found[1])
        elif b"\r\ntransfer-encoding: chunked" not in head:
            raise GeneratorError(f"a response with neither content-length nor chunks: {head[:200]!r}")


def requests_of(plan: Plan) -> list[bytes]:
    """Every request of a plan as it goes out; texts are distinct until they come round."""
    size = plan.texts_per_request
    found = []
    for first in range(0, len(plan.texts) - size + 1, size):
        chosen = plan.texts[first : first + size]
        body = json.dumps({**({"text": chosen[0]} if size == 1 else {"texts": chosen}), **plan.extra}).encode()
        head = (
            f"POST {plan.path} HTTP/1.1\r\nhost: {HOST}:{plan.port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        found.append(head.encode() + body)
    return found


def arrivals(rate: float, duration_s: float, seed: int) -> Iterator[float]:
    """Seconds of independent arrivals (exponential gaps) at a mean rate, up to a duration."""
    draw = random.Random(seed)
    at = draw.expovariate(rate)
    while at < duration_s:
        yield at
        at += draw.expovariate(rate)


class _Connection:
    __slots__ = ("due", "out", "reader", "sent", "socket")

    def __init__(self, port: int) -> None:
        self.reader = ResponseReader()
        self.out = memoryview(b"")
        self.due = self.sent = 0.0
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.connect_ex((HOST, port))


class Generator:
    """Carries out a plan once. `tell` hears "begin" and "end" of the window."""

    def __init__(self, plan: Plan, tell: Any) -> None:
        if (plan.connections is None) == (plan.rate is None):
            raise GeneratorError("a plan needs either connections (closed loop) or a rate (open loop)")
        self._plan = plan
        self._tell = tell
        self._requests = requests_of(plan)
        if not self._requests:
            raise GeneratorError(f"{len(plan.texts)} texts are too few for {plan.texts_per_request} a request")
        self._next = plan.start
        self._selector = selectors.DefaultSelector()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._waiting: deque[float] = deque()
        self._outcome = Outcome()
        self._times: dict[int, list[float]] = {}
        self._late: list[float] = []
        self._window = (0.0, 0.0)
        self._sending = True

    def run(self) -> Outcome:
        """The outcome, once what was sent is answered or the drain's time is over."""
        plan = self._plan
        opened = time.perf_counter() + 0.01
        self._window = (opened + plan.warm_s, opened + plan.warm_s + plan.window_s)
        schedule: Iterator[float] = iter(())
        if plan.rate is not None:
            schedule = (opened + at for at in arrivals(plan.rate, plan.warm_s + plan.window_s, plan.seed))
        else:
            for _ in range(plan.connections or 0):
                self._send(time.perf_counter())
        self._work(schedule, until=self._window[0])
        started, cpu = time.perf_counter(), time.process_time()
        self._tell("begin")
        self._work(schedule, until=self._window[1])
        self._outcome.elapsed_s, self._outcome.cpu_s = time.perf_counter() - started, time.process_time() - cpu
        self._tell("end")
        self._sending = False
        self._work(iter(()), until=time.perf_counter() + DRAIN_S, drain=True)
        return self._finish()

    def _work(self, schedule: Iterator[float], until: float, drain: bool = False) -> None:
        """Sends what is due and takes what comes, up to a time; a drain ends when nothing is awaited any more."""
        due = self._pending_due if self._pending_due is not None else next(schedule, None)
        while (now := time.perf_counter()) < until:
            while due is not None and due <= now:
                self._send(due)
                due = next(schedule, None)
            if drain and not self._busy and not self._waiting:
                break
            wake = until if due is None else min(due, until)
            for key, mask in self._selector.select(max(0.0, min(wake - time.perf_counter(), 0.5))):
                self._serve(key.data, mask)
        self._pending_due = due

    _pending_due: float | None = None

    def _send(self, due: float) -> None:
        if self._plan.rate is not None and self._window[0] <= due < self._window[1]:
            self._late.append(time.perf_counter() - due)
        if self._idle or len(self._busy) < MAX_CONNECTIONS:
            self._start(self._free_connection(), due)
        else:
            self._outcome.waited += 1
            self._waiting.append(due)

    def _free_connection(self) -> _Connection:
        """One that is kept, or a new one."""
        if self._idle:
            return self._idle.pop()
        connection = _Connection(self._plan.port)
        self._outcome.connections += 1
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        return connection

    def _start(self, connection: _Connection, due: float) -> None:
        connection.due = due
        connection.out = memoryview(self._requests[self._next % len(self._requests)])
        self._next += 1
        self._busy.add(connection)
        connection.sent = time.perf_counter()
        self._push(connection)

    def _push(self, connection: _Connection) -> None:
        """Sends as much as the socket takes; the rest goes when it takes more."""
        try:
            connection.out = connection.out[connection.socket.send(connection.out) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(connection, f"send: {error}")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.out else 0)
        if self._selector.get_key(connection.socket).events != wanted:
            self._selector.modify(connection.socket, wanted, connection)

    def _serve(self, connection: _Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._push(connection)
        if not mask & selectors.EVENT_READ or connection.socket.fileno() < 0:
            return
        try:
            data = connection.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(connection, f"receive: {error}")
            return
        if not data:
            self._lose(connection, "the server closed a connection that waited for an answer")
            return
        status = connection.reader.feed(data)
        if status is not None:
            self._done(connection, status)

    def _done(self, connection: _Connection, status: int) -> None:
        now = time.perf_counter()
        since, counted_at = (connection.sent, now) if self._plan.rate is None else (connection.due, connection.due)
        if self._window[0] <= counted_at < self._window[1]:
            self._times.setdefault(status, []).append(now - since)
        if status not in (200, 429) and len(self._outcome.failures) < 3:
            self._outcome.failures.append(f"{status}: {connection.reader.body[:300].decode(errors='replace')}")
        connection.reader.restart()
        self._busy.discard(connection)
        if connection.reader.closes:
            self._drop(connection)
        else:
            self._idle.append(connection)
        if self._waiting:
            self._start(self._free_connection(), self._waiting.popleft())
        elif self._plan.rate is None and self._sending:
            self._send(now)

    def _lose(self, connection: _Connection, why: str) -> None:
        """A connection that ended: no matter while it was idle, a failed request otherwise."""
        self._drop(connection)
        if connection in self._busy:
            self._busy.discard(connection)
            self._outcome.statuses["lost"] = self._outcome.statuses.get("lost", 0) + 1
            if len(self._outcome.failures) < 3:
                self._outcome.failures.append(why)
            if self._plan.rate is None and self._sending:
                if self._outcome.statuses["lost"] > 100:
                    raise GeneratorError(f"over 100 requests were lost; the last: {why}")
                self._send(time.perf_counter())
        else:
            self._idle.remove(connection)

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _finish(self) -> Outcome:
        outcome = self._outcome
        outcome.unanswered = len(self._busy) + len(self._waiting)
        for status, times in sorted(self._times.items()):
            outcome.statuses[str(status)] = len(times)
            in_ms = [1e3 * t for t in times]
            outcome.latency_ms[str(status)] = {
                "p50": percentile(in_ms, 50),
                "p99": percentile(in_ms, 99),
                "mean": sum(in_ms) / len(in_ms),
                "max": max(in_ms),
            }
        outcome.late_p99_ms = 1e3 * percentile(self._late, 99) if self._late else 0.0
        for connection in [*self._busy, *self._idle]:
            self._drop(connection)
        self._selector.close()
        return outcome


def main() -> None:
    """Reads a plan, carries it out, and writes what happened."""

    def say(value: dict[str, Any]) -> None:
        print(json.dumps(value), flush=True)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, MAX_CONNECTIONS + 100)), hard))
    plan = Plan(**json.loads(sys.stdin.readline()))
    generator = Generator(plan, lambda event: say({"event": event}))
    gc.collect()
    gc.disable()  # what it holds is bounded, and a pause would be a latency of its own
    outcome = generator.run()
    say({name: getattr(outcome, name) for name in Outcome.__dataclass_fields__})


if __name__ == "__main__":
    main()
