"""The client for asyncio."""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Self, Unpack, overload

import httpx

from tokenalign.client.answers import (
    ClassifyResponse,
    KeptLabelSet,
    LabelSetReport,
    ModelInfo,
    classify_response,
    joined,
    kept_label_set,
    label_set_report,
    model_info,
    nothing_asked,
)
from tokenalign.client.errors import NoAnswerError, ServiceConnectionError, ServiceUnavailableError, moved
from tokenalign.client.requests import NDJSON, ClassifyOptions, LabelList, Labels, Part, Question, label_set_body
from tokenalign.client.retries import Clock, Deadline
from tokenalign.client.streams import Indexed, StreamedPart, StreamSummary
from tokenalign.client.transport import (
    CLASSIFY,
    LABEL_SETS,
    MODEL,
    READY,
    Connection,
    Reply,
    label_set_path,
    refused,
    request_id,
    whole,
)
from tokenalign.errors import ConfigError, InputError, TokenAlignError
from tokenalign.results import Classification


class AsyncTokenAlignClient:
    """Scores texts against labels by asking a tokenalign service, without blocking the event loop.

    `await client(text, labels)` gives what `TokenAlignClassifier`'s call gives: one `Classification` for a string, a
    list of them for a list. Tasks of one event loop may share a client. Close it, or use it in an `async with`; it
    keeps its connections open until then. An `http_client` that is given stays the caller's to close.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float | None = 120.0,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 60.0,
        max_retries: int = 4,
        max_connections: int = 16,
        max_concurrency: int = 4,
        transport: httpx.AsyncBaseTransport | None = None,
        http_client: httpx.AsyncClient | None = None,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._connection = Connection(
            url,
            api_key=api_key,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            read_timeout_s=read_timeout_s,
            max_retries=max_retries,
            max_connections=max_connections,
            clock=clock,
            jitter=jitter,
        )
        if max_concurrency < 1:
            raise ConfigError(f"max_concurrency: must be at least 1; it is {max_concurrency}")
        self._max_concurrency = max_concurrency
        self._sleep = sleep
        self._owned = http_client is None
        self._http = http_client or httpx.AsyncClient(limits=self._connection.limits, transport=transport)

    async def aclose(self) -> None:
        """Closes the connections."""
        if self._owned:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @overload
    async def classify(  # type: ignore[overload-overlap]  # a str is an Iterable[str] too; the first match is the right one
        self,
        texts: str,
        labels: Labels | None = ...,
        *,
        label_set: str | None = ...,
        **options: Unpack[ClassifyOptions],
    ) -> Classification: ...

    @overload
    async def classify(
        self,
        texts: Iterable[str],
        labels: Labels | None = ...,
        *,
        label_set: str | None = ...,
        **options: Unpack[ClassifyOptions],
    ) -> list[Classification]: ...

    async def classify(
        self,
        texts: str | Iterable[str],
        labels: Labels | None = None,
        *,
        label_set: str | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> Classification | list[Classification]:
        """One answer for a string, a list of answers for a list, in order.

        labels: as the library takes them; label_set: instead of them, the id that `add_label_set` gave
        options: see `ClassifyOptions`
        Raises `InputError` that names the text or label at fault, and `ServiceError` where the service gave no answer.
        """
        response = await self.classify_response(texts, labels, label_set=label_set, **options)
        return response.results[0] if isinstance(texts, str) else response.results

    __call__ = classify

    async def classify_response(
        self,
        texts: str | Iterable[str],
        labels: Labels | None = None,
        *,
        label_set: str | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> ClassifyResponse:
        """What `classify` gives, always as a list, with warnings, model and usage.

        More texts than the service takes at once go in several requests, `max_concurrency` of them at a time.
        Raises what `classify` raises, and `FingerprintMismatchError` when the model changed between two requests.
        """
        question, deadline = Question.of(texts, labels, label_set, options), self._connection.deadline()
        parts = await self._parts(question, deadline)
        if not parts:
            return nothing_asked(await self._info(deadline))
        return joined(question, parts, await self._ask_all(question, parts, deadline))

    def classify_stream(
        self,
        texts: Iterable[str],
        labels: Labels | None = None,
        *,
        label_set: str | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> "AsyncClassifyStream":
        """An asynchronous iterator over pairs of a text's index and its answer, each as soon as the service has it.

        Its `warnings`, `model` and `usage` are known at its end; answers carry no warnings of their own. `timeout_s`
        counts until a stream begins, `read_timeout_s` between two pieces of it. What is broken off is not retried.
        """
        return AsyncClassifyStream(self, Question.of(texts, labels, label_set, options))

    async def add_label_set(self, labels: LabelList, name: str | None = None) -> LabelSetReport:
        """The service's report on labels that it keeps from now on, and has encoded; its `id` stands for them."""
        reply = await self._fetch("POST", LABEL_SETS, self._connection.deadline(), label_set_body(labels, name))
        return label_set_report(reply.json(), reply.request_id, new=reply.status == 201)

    async def label_set(self, set_id: str) -> KeptLabelSet:
        """The label set with that id; `NotFoundError` where there is none."""
        reply = await self._fetch("GET", label_set_path(set_id), self._connection.deadline())
        return kept_label_set(reply.json(), reply.request_id)

    async def delete_label_set(self, set_id: str) -> None:
        """Returns once the service keeps no such set, whether or not it did before."""
        await self._fetch("DELETE", label_set_path(set_id), self._connection.deadline())

    async def model(self) -> ModelInfo:
        """What is served; the limits by which texts are split are read anew with it."""
        return await self._ask_info(self._connection.deadline())

    async def ready(self) -> bool:
        """Whether the service can answer now, asked once: False when it says no, or nobody listens."""
        try:
            await self._fetch("GET", READY, self._connection.deadline(), retry=False)
        except (NoAnswerError, ServiceUnavailableError):
            return False
        return True

    async def _info(self, deadline: Deadline) -> ModelInfo:
        # Two calls that ask at once both get it, and one of two equal answers stays.
        return self._connection.info or await self._ask_info(deadline)

    async def _ask_info(self, deadline: Deadline) -> ModelInfo:
        reply = await self._fetch("GET", MODEL, deadline)
        info = model_info(reply.json(), reply.request_id)
        self._connection.info = info
        return info

    async def _parts(self, question: Question, deadline: Deadline) -> list[Part]:
        parts = whole(question)
        if parts is None:
            limits = (await self._info(deadline))["limits"]
            parts = question.parts(limits["max_texts"], limits["max_body_bytes"])
        return parts

    async def _ask_all(self, question: Question, parts: list[Part], deadline: Deadline) -> list[ClassifyResponse]:
        """The answers in order; the first failure ends the others."""
        room = asyncio.Semaphore(self._max_concurrency)

        async def ask(part: Part) -> ClassifyResponse:
            async with room:
                return await self._ask(question, part, deadline)

        asked = [asyncio.ensure_future(ask(part)) for part in parts]
        try:
            return await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _ask(self, question: Question, part: Part, deadline: Deadline) -> ClassifyResponse:
        try:
            reply = await self._fetch("POST", CLASSIFY, deadline, question.body(part))
            return classify_response(reply.json(), reply.request_id, texts=len(part))
        except InputError as error:
            raise moved(error, part.start, labels_per_text=question.labels_per_text) from error.__cause__

    async def _fetch(
        self, method: str, path: str, deadline: Deadline, body: bytes | None = None, *, retry: bool = True
    ) -> Reply:
        async with self._within(deadline), self._open(method, path, deadline, body, retry=retry) as response:
            pieces = [piece async for piece in self._pieces(response, deadline)]
            return Reply(response.status_code, request_id(response), b"".join(pieces))

    @contextlib.asynccontextmanager
    async def _within(self, deadline: Deadline) -> AsyncIterator[None]:
        """Gives up what is under way at the deadline."""
        left_s = deadline.left_s()
        try:
            async with asyncio.timeout(None if math.isinf(left_s) else left_s) as limit:
                yield
        except TimeoutError as error:
            raise (self._connection.out_of_time() if limit.expired() else error) from error.__cause__

    @contextlib.asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        body: bytes | None = None,
        accept: str | None = None,
        *,
        retry: bool = True,
    ) -> AsyncIterator[httpx.Response]:
        """A response that is a success, its body not yet read; asked for again while that is due."""
        async with self._within(deadline):
            response = await self._begin(method, path, deadline, body, accept, retry=retry)
        try:
            yield response
        finally:
            await response.aclose()

    async def _begin(
        self, method: str, path: str, deadline: Deadline, body: bytes | None, accept: str | None, *, retry: bool
    ) -> httpx.Response:
        retries = 0
        while True:
            try:
                return await self._attempt(self._connection.request(method, path, deadline, body, accept), deadline)
            except TokenAlignError as failure:
                if not retry:
                    raise
                wait_s = self._connection.retries.wait_s(failure, retries, deadline)
            await self._sleep(wait_s)
            retries += 1

    async def _attempt(self, request: httpx.Request, deadline: Deadline) -> httpx.Response:
        try:
            response = await self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            raise self._connection.failure(error, begun=False) from error
        if response.is_success:
            return response
        body = b""
        with contextlib.suppress(ServiceConnectionError):
            try:
                body = b"".join([piece async for piece in self._pieces(response, deadline)])
            finally:
                await response.aclose()
        raise refused(response, body)

    async def _pieces(self, response: httpx.Response, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        try:
            async for piece in response.aiter_bytes():
                yield piece
                if deadline.left_s() <= 0:
                    raise self._connection.out_of_time()
        except httpx.HTTPError as error:
            raise self._connection.failure(error, begun=True) from error

    async def _stream(self, question: Question, summary: StreamSummary) -> AsyncGenerator[Indexed, None]:
        deadline = self._connection.deadline()
        parts = await self._parts(question, deadline)
        for part in parts:
            deadline = self._connection.deadline()
            try:
                async with self._open("POST", CLASSIFY, deadline, question.body(part), NDJSON) as response:
                    deadline.lift()
                    streamed = StreamedPart(part, response.headers.get("content-type", ""), request_id(response))
                    async with contextlib.aclosing(self._pieces(response, deadline)) as pieces:
                        async for piece in pieces:
                            for item in streamed.feed(piece):
                                yield item
                    for item in streamed.end():
                        yield item
                    summary.add(part, streamed)
            except InputError as error:
                raise moved(error, part.start, labels_per_text=question.labels_per_text) from error.__cause__
        summary.finish(None if parts else nothing_asked(await self._info(deadline)))


class AsyncClassifyStream(StreamSummary):
    """Iterates over `(index, Classification)`; `warnings`, `model` and `usage` are known at the end.

    Leaving an `async with`, or `aclose`, gives up the rest.
    """

    def __init__(self, client: AsyncTokenAlignClient, question: Question) -> None:
        super().__init__(question)
        self._items = client._stream(question, self)

    def __aiter__(self) -> AsyncIterator[Indexed]:
        return self

    async def __anext__(self) -> Indexed:
        return await anext(self._items)

    async def aclose(self) -> None:
        """Ends the exchange; what has not arrived won't."""
        await self._items.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
