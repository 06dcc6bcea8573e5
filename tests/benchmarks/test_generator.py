"""The load generator against a small server of its own."""

import http.server
import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.benchmarks.generator import Generator, GeneratorError, Plan, ResponseReader, arrivals, requests_of

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 429 Too Many\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"


class TestResponseReader:
    @pytest.mark.parametrize(("response", "status"), [(ANSWER, 200), (CHUNKED, 429)])
    def test_bytes_may_come_in_any_pieces(self, response: bytes, status: int) -> None:
        """A response is whole at its last byte and not before, wherever it was cut."""
        for cut in range(1, len(response)):
            reader = ResponseReader()
            assert reader.feed(response[:cut]) is None
            assert reader.feed(response[cut:]) == status

    def test_one_after_the_other(self) -> None:
        """A reader is used again; the last response leaves nothing behind."""
        reader = ResponseReader()
        assert reader.feed(CHUNKED) == 429
        reader.restart()
        assert reader.feed(ANSWER) == 200
        assert reader.body == b"hello"
        assert not reader.closes

    def test_the_server_may_close(self) -> None:
        """It says so in its head."""
        reader = ResponseReader()
        reader.feed(b"HTTP/1.1 503 No\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        assert reader.closes

    @pytest.mark.parametrize("response", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\n"])
    def test_what_it_can_not_read(self, response: bytes) -> None:
        """Another protocol, or a body without an end, is an error and no latency."""
        with pytest.raises(GeneratorError):
            ResponseReader().feed(response)


def plan(**changes: Any) -> Plan:
    return replace(Plan(1, "/v1/classify", ["a", "b", "c", "d", "e"], 1, {"label_set": "x"}, connections=2), **changes)


def bodies(found: list[bytes]) -> list[Any]:
    return [json.loads(request.partition(b"\r\n\r\n")[2]) for request in found]


class TestRequests:
    def test_one_text(self) -> None:
        """Every text has its request, with the other keys beside it, and the length that its head says."""
        found = requests_of(plan())
        assert bodies(found)[1] == {"text": "b", "label_set": "x"}
        head, _, body = found[1].partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head

    def test_several_texts(self) -> None:
        """Texts are dealt out in order; what is left over is not sent."""
        assert bodies(requests_of(plan(texts_per_request=2))) == [
            {"texts": ["a", "b"], "label_set": "x"},
            {"texts": ["c", "d"], "label_set": "x"},
        ]

    def test_closed_or_open(self) -> None:
        """A plan is either of the two."""
        for wrong in (plan(rate=5.0), plan(connections=None)):
            with pytest.raises(GeneratorError, match="either connections"):
                Generator(wrong, print)

    def test_too_few_texts(self) -> None:
        """Said at once."""
        with pytest.raises(GeneratorError, match="5 texts are too few for 6"):
            Generator(plan(texts_per_request=6), print)


def test_arrivals_keep_the_rate() -> None:
    """Their number is that of the rate, their gaps are not equal, and the same seed draws the same."""
    found = list(arrivals(1_000, 20.0, seed=1))
    assert len(found) == pytest.approx(20_000, rel=0.05)
    assert found == sorted(found)
    assert found[-1] < 20.0
    assert list(arrivals(1_000, 20.0, seed=1)) == found
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert sum(gap > 2 / 1_000 for gap in gaps) == pytest.approx(0.135 * len(gaps), rel=0.2)


class Server(http.server.ThreadingHTTPServer):
    """Answers 200, every third request 429 where it is told to; knows the texts it got."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.refuses = False
        self.released = threading.Event()
        self.released.set()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_POST(self) -> None:
        self.server.texts.append(json.loads(self.rfile.read(int(self.headers["content-length"])))["text"])
        self.server.released.wait()
        status = 429 if self.server.refuses and len(self.server.texts) % 3 == 0 else 200
        self.send_response(status)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def test_closed_loop(server: Server) -> None:
    """So many callers, each waiting for its answer before it sends again; all are answered at the end."""
    events: list[str] = []
    port = server.server_address[1]
    outcome = Generator(plan(port=port, connections=3, warm_s=0.05, window_s=0.2, start=3), events.append).run()
    assert events == ["begin", "end"]
    assert outcome.connections == 3
    assert set(outcome.statuses) == {"200"}
    assert 0 < outcome.statuses["200"] < len(server.texts)  # what came before or after the window is not counted
    assert outcome.unanswered == 0
    assert outcome.latency_ms["200"]["p50"] <= outcome.latency_ms["200"]["p99"] <= outcome.latency_ms["200"]["max"]
    assert 0 < outcome.cpu_s <= outcome.elapsed_s + 0.05


def test_texts_come_round(server: Server) -> None:
    """In order, from where the plan begins."""
    port = server.server_address[1]
    Generator(plan(port=port, connections=1, warm_s=0.0, window_s=0.3, start=3), lambda _: None).run()
    assert len(server.texts) > 3
    assert server.texts == list(itertools.islice(itertools.cycle("deabc"), len(server.texts)))


def test_open_loop(server: Server) -> None:
    """What was drawn is sent, whatever comes back, and every answer of the window is counted by its status."""
    server.refuses = True
    drawn = [at for at in arrivals(200, 0.5, seed=7) if at >= 0.1]
    opened = plan(port=server.server_address[1], connections=None, rate=200, warm_s=0.1, window_s=0.4, seed=7)
    outcome = Generator(opened, lambda _: None).run()
    assert sum(outcome.statuses.values()) == len(drawn)
    assert set(outcome.statuses) == {"200", "429"}
    assert outcome.unanswered == outcome.waited == 0


def test_late_answers_count(server: Server) -> None:
    """An answer that comes after the window belongs to it when its request was due in it, as long as that took."""
    server.released.clear()
    drawn = [at for at in arrivals(100, 0.3, seed=3) if at >= 0.1]
    opened = plan(port=server.server_address[1], connections=None, rate=100, warm_s=0.1, window_s=0.2, seed=3)
    outcome = Generator(opened, lambda event: server.released.set() if event == "end" else None).run()
    assert outcome.statuses == {"200": len(drawn)}
    assert outcome.connections > len(drawn)  # nobody waited for a connection that was in use


def test_nobody_listens() -> None:
    """A closed loop that only loses requests ends with the reason."""
    with pytest.raises(GeneratorError, match=r"over 100 requests were lost; the last: send: .*refused"):
        Generator(plan(port=9, warm_s=0.1, window_s=30.0), print).run()
