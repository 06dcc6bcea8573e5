"""The client for programs without asyncio."""

import contextlib
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator
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
from tokenalign.errors import InputError, TokenAlignError
from tokenalign.results import Classification


class TokenAlignClient:
    """Scores texts against labels by asking a tokenalign service.

    `client(text, labels)` gives what `TokenAlignClassifier`'s call gives: one `Classification` for a string, a list of
    them for a list. Threads may share a client. Close it, or use it in a `with`; it keeps its connections open until
    then. An `http_client` that is given stays the caller's to close.
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
        transport: httpx.BaseTransport | None = None,
        http_client: httpx.Client | None = None,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
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
        self._sleep = sleep
        self._owned = http_client is None
        self._http = http_client or httpx.Client(limits=self._connection.limits, transport=transport)

    def close(self) -> None:
        """Closes the connections."""
        if self._owned:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @overload
    def classify(  # type: ignore[overload-overlap]  # a str is an Iterable[str] too; the first match is the right one
        self,
        texts: str,
        labels: Labels | None = ...,
        *,
        label_set: str | None = ...,
        **options: Unpack[ClassifyOptions],
    ) -> Classification: ...

    @overload
    def classify(
        self,
        texts: Iterable[str],
        labels: Labels | None = ...,
        *,
        label_set: str | None = ...,
        **options: Unpack[ClassifyOptions],
    ) -> list[Classification]: ...

    def classify(
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
        results = self.classify_response(texts, labels, label_set=label_set, **options).results
        return results[0] if isinstance(texts, str) else results

    __call__ = classify

    def classify_response(
        self,
        texts: str | Iterable[str],
        labels: Labels | None = None,
        *,
        label_set: str | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> ClassifyResponse:
        """What `classify` gives, always as a list, with warnings, model and usage.

        More texts than the service takes at once go in several requests, one after the other.
        Raises what `classify` raises, and `FingerprintMismatchError` when the model changed between two requests.
        """
        question, deadline = Question.of(texts, labels, label_set, options), self._connection.deadline()
        parts = self._parts(question, deadline)
        if not parts:
            return nothing_asked(self._info(deadline))
        return joined(question, parts, [self._ask(question, part, deadline) for part in parts])

    def classify_stream(
        self,
        texts: Iterable[str],
        labels: Labels | None = None,
        *,
        label_set: str | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> "ClassifyStream":
        """An iterator over pairs of a text's index and its answer, each as soon as the service has it.

        Its `warnings`, `model` and `usage` are known at its end; answers carry no warnings of their own. `timeout_s`
        counts until a stream begins, `read_timeout_s` between two pieces of it. What is broken off is not retried.
        """
        return ClassifyStream(self, Question.of(texts, labels, label_set, options))

    def add_label_set(self, labels: LabelList, name: str | None = None) -> LabelSetReport:
        """The service's report on labels that it keeps from now on, and has encoded; its `id` stands for them."""
        reply = self._fetch("POST", LABEL_SETS, self._connection.deadline(), label_set_body(labels, name))
        return label_set_report(reply.json(), reply.request_id, new=reply.status == 201)

    def label_set(self, set_id: str) -> KeptLabelSet:
        """The label set with that id; `NotFoundError` where there is none."""
        reply = self._fetch("GET", label_set_path(set_id), self._connection.deadline())
        return kept_label_set(reply.json(), reply.request_id)

    def delete_label_set(self, set_id: str) -> None:
        """Returns once the service keeps no such set, whether or not it did before."""
        self._fetch("DELETE", label_set_path(set_id), self._connection.deadline())

    def model(self) -> ModelInfo:
        """What is served; the limits by which texts are split are read anew with it."""
        return self._ask_info(self._connection.deadline())

    def ready(self) -> bool:
        """Whether the service can answer now, asked once: False when it says no, or nobody listens."""
        try:
            self._fetch("GET", READY, self._connection.deadline(), retry=False)
        except (NoAnswerError, ServiceUnavailableError):
            return False
        return True

    def _info(self, deadline: Deadline) -> ModelInfo:
        # Two threads that ask at once both get it, and one of two equal answers stays.
        return self._connection.info or self._ask_info(deadline)

    def _ask_info(self, deadline: Deadline) -> ModelInfo:
        reply = self._fetch("GET", MODEL, deadline)
        info = model_info(reply.json(), reply.request_id)
        self._connection.info = info
        return info

    def _parts(self, question: Question, deadline: Deadline) -> list[Part]:
        parts = whole(question)
        if parts is None:
            limits = self._info(deadline)["limits"]
            parts = question.parts(limits["max_texts"], limits["max_body_bytes"])
        return parts

    def _ask(self, question: Question, part: Part, deadline: Deadline) -> ClassifyResponse:
        try:
            reply = self._fetch("POST", CLASSIFY, deadline, question.body(part))
            return classify_response(reply.json(), reply.request_id, texts=len(part))
        except InputError as error:
            raise moved(error, part.start, labels_per_text=question.labels_per_text) from error.__cause__

    def _fetch(
        self, method: str, path: str, deadline: Deadline, body: bytes | None = None, *, retry: bool = True
    ) -> Reply:
        with self._open(method, path, deadline, body, retry=retry) as response:
            return Reply(response.status_code, request_id(response), b"".join(self._pieces(response, deadline)))

    @contextlib.contextmanager
    def _open(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        body: bytes | None = None,
        accept: str | None = None,
        *,
        retry: bool = True,
    ) -> Iterator[httpx.Response]:
        """A response that is a success, its body not yet read; asked for again while that is due."""
        response = self._begin(method, path, deadline, body, accept, retry=retry)
        try:
            yield response
        finally:
            response.close()

    def _begin(
        self, method: str, path: str, deadline: Deadline, body: bytes | None, accept: str | None, *, retry: bool
    ) -> httpx.Response:
        retries = 0
        while True:
            try:
                return self._attempt(self._connection.request(method, path, deadline, body, accept), deadline)
            except TokenAlignError as failure:
                if not retry:
                    raise
                wait_s = self._connection.retries.wait_s(failure, retries, deadline)
            self._sleep(wait_s)
            retries += 1

    def _attempt(self, request: httpx.Request, deadline: Deadline) -> httpx.Response:
        try:
            response = self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            raise self._connection.failure(error, begun=False) from error
        if response.is_success:
            return response
        body = b""
        with contextlib.closing(response), contextlib.suppress(ServiceConnectionError):
            body = b"".join(self._pieces(response, deadline))
        raise refused(response, body)

    def _pieces(self, response: httpx.Response, deadline: Deadline) -> Iterator[bytes]:
        try:
            for piece in response.iter_bytes():
                yield piece
                if deadline.left_s() <= 0:
                    raise self._connection.out_of_time()
        except httpx.HTTPError as error:
            raise self._connection.failure(error, begun=True) from error

    def _stream(self, question: Question, summary: StreamSummary) -> Generator[Indexed, None, None]:
        deadline = self._connection.deadline()
        parts = self._parts(question, deadline)
        for part in parts:
            deadline = self._connection.deadline()
            try:
                with self._open("POST", CLASSIFY, deadline, question.body(part), NDJSON) as response:
                    deadline.lift()
                    streamed = StreamedPart(part, response.headers.get("content-type", ""), request_id(response))
                    for piece in self._pieces(response, deadline):
                        yield from streamed.feed(piece)
                    yield from streamed.end()
                    summary.add(part, streamed)
            except InputError as error:
                raise moved(error, part.start, labels_per_text=question.labels_per_text) from error.__cause__
        summary.finish(None if parts else nothing_asked(self._info(deadline)))


class ClassifyStream(StreamSummary):
    """Iterates over `(index, Classification)`; `warnings`, `model` and `usage` are known at the end.

    Leaving a `with`, or `close`, gives up the rest.
    """

    def __init__(self, client: TokenAlignClient, question: Question) -> None:
        super().__init__(question)
        self._items = client._stream(question, self)

    def __iter__(self) -> Iterator[Indexed]:
        return self

    def __next__(self) -> Indexed:
        return next(self._items)

    def close(self) -> None:
        """Ends the exchange; what has not arrived won't."""
        self._items.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
