"""Answers line by line: the results of an answer in one piece, errors in the form of all errors, none for who left."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from deploy.wire import ReplicaLostError
from tokenalign.client.requests import Part
from tokenalign.client.streams import StreamedPart
from tokenalign.errors import InputError

Stack = Any
RunStack = Callable[..., Any]
Until = Callable[[Callable[[], bool]], Any]

NDJSON = {"accept": "application/x-ndjson"}
LABELS = ["card payment", "cash", {"name": "declined", "description": ["declined", "not charged"]}]
TEXTS = [f"card number {i} was declined" for i in range(7)] + ["cash", "cash", "twice"]


async def stream(stack: Stack, **body: Any) -> list[dict[str, Any]]:
    """The lines of an answer."""
    response = await stack.client.post("/v1/classify", json=body, headers=NDJSON)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].partition(";")[0] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


class Connection:
    """A request at the application's own interface, whose lines show as they are sent, and which may end."""

    def __init__(self, stack: Stack, **body: Any) -> None:
        self.lines: list[dict[str, Any]] = []
        self.status: int | None = None
        self.ended = False
        self.gone = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self._body = json.dumps(body).encode()
        self._sent = False
        headers = [(b"accept", b"text/html, application/x-ndjson;q=0.9")]
        scope = {"type": "http", "method": "POST", "path": "/v1/classify", "headers": headers, "query_string": b""}
        self.task = asyncio.ensure_future(stack.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reading.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message.get("body"):
            self.lines += [json.loads(line) for line in message["body"].splitlines()]
        elif not message.get("more_body"):
            self.ended = True


class TestAnswers:
    @pytest.mark.parametrize("options", [{}, {"explain": "all", "return_logits": True, "top_k": 2, "min_score": 1.0}])
    async def test_the_same_as_in_one_piece(self, any_stack: Stack, options: dict[str, Any]) -> None:
        """A line for each text with its index, and a last one with what all share: together the answer in one piece."""
        whole = await any_stack.ask(texts=TEXTS, labels=LABELS, **options)
        *results, summary = await stream(any_stack, texts=TEXTS, labels=LABELS, **options)
        assert sorted(line["index"] for line in results) == list(range(len(TEXTS)))
        for line in results:
            expected = whole["results"][line.pop("index")]
            assert line.keys() == expected.keys()
            assert line["label"] == expected["label"]
            assert line["score"] == pytest.approx(expected["score"], abs=1e-3)
        assert summary.keys() == {"warnings", "model", "usage"}
        assert summary["model"] == whole["model"]
        assert summary["usage"] == {**whole["usage"], "labels_cached": 4}

    async def test_warnings_and_labels_of_each_text(self, stack: Stack) -> None:
        """The last line's warnings are in the order of the texts, whichever was answered first."""
        texts, labels = ["a", "b", "c"], [["x", "card " * 300], ["x", "y"], ["cash " * 300, "x"]]
        whole = await stack.ask(texts=texts, labels=labels, long_text="window")
        *_, summary = await stream(stack, texts=texts, labels=labels, long_text="window")
        assert summary["warnings"] == whole["warnings"]
        assert [warning["loc"] for warning in summary["warnings"]] == [["labels", 0, 1], ["labels", 2, 0]]

    async def test_the_client_reads_it(self, stack: Stack) -> None:
        """What the Python client takes for a stream."""
        response = await stack.client.post("/v1/classify", json={"texts": TEXTS, "labels": LABELS}, headers=NDJSON)
        part = StreamedPart(Part(0, len(TEXTS)), response.headers["content-type"], None)
        found = dict(part.feed(response.content))
        assert list(part.end()) == []
        assert sorted(found) == list(range(len(TEXTS)))
        assert part.summary is not None
        assert part.summary.usage["labels"] == 4

    async def test_only_where_it_is_asked_for(self, stack: Stack) -> None:
        """Other answers are in one piece."""
        for accept in ("application/json", "*/*", "application/x-ndjsonx"):
            response = await stack.client.post(
                "/v1/classify", json={"text": "card", "labels": LABELS}, headers={"accept": accept}
            )
            assert response.headers["content-type"] == "application/json"

    async def test_each_line_as_soon_as_its_batch_is_back(self, run_stack: RunStack, bert: Any, until: Until) -> None:
        """Lines go out while later texts still wait for a slot."""
        async with run_stack(bert, batching={"max_batch_texts": 2}) as stack:
            send, held = stack.ingress._send, asyncio.Event()

            async def hold(batch: Any) -> Any:
                if len(stack.sent) >= 2:
                    await held.wait()
                return await send(batch)

            stack.ingress._send = hold
            connection = Connection(stack, texts=TEXTS, labels=LABELS)
            await until(lambda: len(connection.lines) == 4)
            assert not connection.ended
            held.set()
            await connection.task
            assert len(connection.lines) == len(TEXTS) + 1
            assert connection.ended

    async def test_a_thousand_texts_wait_their_turn(self, run_stack: RunStack, bert: Any, until: Until) -> None:
        """Of many texts only a few batches are under way; a caller who reads slowly holds up its own texts alone."""
        texts = [f"card {i}" for i in range(1_024)]
        async with run_stack(bert, batching={"max_batch_texts": 8, "max_queue_texts": 64}) as stack:
            connection = Connection(stack, texts=texts, labels=LABELS)
            connection.reading.clear()
            bound = 8 * stack.slots
            await until(lambda: sum(len(batch.questions) for batch in stack.sent) >= bound)
            assert (await stack.post(text="cash", labels=LABELS)).status_code == 200
            assert sum(len(batch.questions) for batch in stack.sent) <= bound + 1
            connection.reading.set()
            await connection.task
            assert sorted(line["index"] for line in connection.lines[:-1]) == list(range(1_024))
            assert connection.lines[-1]["usage"]["labels"] == 4


class TestErrors:
    @pytest.mark.parametrize(
        ("body", "status", "loc"),
        [
            ({"texts": ["a"], "labels": ["a"]}, 422, ["labels"]),
            ({"texts": ["a", "\u200b"], "labels": LABELS}, 422, ["texts", 1]),
            ({"texts": ["a"], "labels": ["a", "\u200b"]}, 422, ["labels", 1]),
            ({"texts": ["a"], "labels": LABELS, "multi_label": True}, 422, ["multi_label"]),
            ({"texts": ["a"], "label_set": "0" * 32}, 404, ["label_set"]),
        ],
    )
    async def test_before_the_first_line(self, stack: Stack, body: dict[str, Any], status: int, loc: list[Any]) -> None:
        """An error has its own status and is one JSON object, as ever."""
        response = await stack.client.post("/v1/classify", json=body, headers=NDJSON)
        assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
        assert response.json()["loc"] == loc

    async def test_a_full_queue(self, run_stack: RunStack, bert: Any, until: Until) -> None:
        """A stream for which there is no room at all is a 429 at once."""
        async with run_stack(bert, batching={"max_queue_texts": 1}) as stack:
            stack.slots = 0
            waiting = asyncio.create_task(stack.post(text="card", labels=LABELS))
            await until(lambda: stack.waiting_texts == 1)
            response = await stack.client.post("/v1/classify", json={"texts": TEXTS, "labels": LABELS}, headers=NDJSON)
            assert (response.status_code, response.json()["error_type"]) == (429, "overloaded")
            assert response.headers["retry-after"]
            stack.slots = 1
            assert (await waiting).status_code == 200

    @pytest.mark.parametrize(
        ("error", "error_type"),
        [(InputError("no; do", ("x",)), "invalid_input"), (RuntimeError("private"), "internal")],
    )
    async def test_after_the_first_line(
        self, run_stack: RunStack, bert: Any, error: Exception, error_type: str
    ) -> None:
        """An error is the last line, in the form of all errors, without a word of the inside; nothing stays."""
        async with run_stack(bert, batching={"max_batch_texts": 2}) as stack:
            stack.slots = 1
            send = stack.ingress._send

            async def fail(batch: Any) -> Any:
                if len(stack.sent) >= 2:
                    raise error
                return await send(batch)

            stack.ingress._send = fail
            *results, last = await stream(stack, texts=TEXTS, labels=LABELS)
            assert len(results) == 4
            assert last.keys() == {"error", "error_type", "loc", "request_id"}
            assert last["error_type"] == error_type
            assert "private" not in last["error"]
            assert stack.waiting_texts == 0

    async def test_a_lost_replica_is_tried_again(self, stack: Stack) -> None:
        """As for an answer in one piece."""
        stack.failures = [ReplicaLostError("gone")]
        assert len(await stream(stack, texts=TEXTS, labels=LABELS)) == len(TEXTS) + 1


class TestLeaving:
    @pytest.mark.parametrize("how", ["disconnect", "cancel"])
    async def test_what_waits_is_cancelled(self, run_stack: RunStack, bert: Any, until: Until, how: str) -> None:
        """When the connection ends, or the server gives the request up, its texts leave the queue, unanswered."""
        async with run_stack(bert, batching={"max_batch_texts": 2}) as stack:
            send = stack.ingress._send

            async def last(batch: Any) -> Any:
                stack.slots = 0
                return await send(batch)

            stack.slots = 1
            stack.ingress._send = last
            connection = Connection(stack, texts=TEXTS, labels=LABELS)
            await until(lambda: len(connection.lines) == 2)
            await until(lambda: stack.waiting_texts == 2)
            if how == "disconnect":
                connection.gone.set()
            else:
                connection.task.cancel()
            await asyncio.wait({connection.task})
            await until(lambda: stack.waiting_texts == 0)
            stack.slots, stack.ingress._send = 1, send
            await stack.ask(text="card", labels=LABELS)
            assert len(stack.sent) == 2  # nothing but the first batch and this one
            assert len(connection.lines) == 2

    async def test_before_the_first_line(self, stack: Stack, until: Until) -> None:
        """A request that the server gives up before its first line leaves the queue as well."""
        stack.slots = 0
        connection = Connection(stack, texts=TEXTS, labels=LABELS)
        await until(lambda: stack.waiting_texts == len(TEXTS))
        connection.task.cancel()
        await until(lambda: stack.waiting_texts == 0)

    async def test_a_connection_that_fails_in_a_send(self, stack: Stack) -> None:
        """A send that fails as the connection is gone ends it quietly."""
        connection = Connection(stack, texts=TEXTS, labels=LABELS)

        async def broken(message: Any) -> None:
            raise OSError("connection reset")

        connection.task.cancel()
        await asyncio.wait({connection.task})
        headers = [(b"accept", b"application/x-ndjson")]
        scope = {"type": "http", "method": "POST", "path": "/v1/classify", "headers": headers, "query_string": b""}
        fresh = Connection(stack, texts=["card"], labels=LABELS)
        await fresh.task
        fresh._sent = False
        await stack.app(scope, fresh._receive, broken)
        assert stack.waiting_texts == 0
