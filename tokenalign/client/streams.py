"""Answers that arrive line by line: a result each, and what they share in the last line."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tokenalign.client.answers import (
    ClassifyResponse,
    ModelIdentity,
    Usage,
    classification,
    classify_response,
    joined,
    model_identity,
    parse_json,
    usage,
    warning_list,
)
from tokenalign.client.errors import InvalidAnswerError, refusal
from tokenalign.client.requests import NDJSON, Part, Question
from tokenalign.results import Classification, Warning_

Indexed = tuple[int, Classification]


@dataclass(slots=True)
class Lines:
    """Cuts what arrives into lines.

    At line feeds alone: JSON may hold U+2028 and other characters at which text is split into lines elsewhere.
    """

    _rest: list[bytes] = field(default_factory=list)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that `data` completes."""
        *complete, rest = data.split(b"\n")
        for line in complete:
            yield b"".join((*self._rest, line))
            self._rest.clear()
        if rest:
            self._rest.append(rest)

    def end(self) -> Iterator[bytes]:
        """The last line, where nothing ended it."""
        if self._rest:
            yield b"".join(self._rest)
            self._rest.clear()


class StreamedPart:
    """Reads the answer to one part of a question; indices are those of all the caller's texts."""

    def __init__(self, part: Part, content_type: str, request_id: str | None) -> None:
        self._part, self._request_id = part, request_id
        self._lines = Lines() if content_type.partition(";")[0].strip().lower() == NDJSON else None
        self._body: list[bytes] = []  # of an answer in one piece, from a service that does not stream
        self._open = set(range(len(part)))
        self.summary: ClassifyResponse | None = None

    def feed(self, data: bytes) -> Iterator[Indexed]:
        """The results that `data` completes.

        An error that the service sends instead is raised, with places as they are in the part.
        """
        if self._lines is None:
            self._body.append(data)
            return
        for line in self._lines.feed(data):
            yield from self._take(line)

    def end(self) -> Iterator[Indexed]:
        """What was left; raises `InvalidAnswerError` unless each text has got its result, and the last line came."""
        if self._lines is None:
            answer = classify_response(
                parse_json(b"".join(self._body), self._request_id), self._request_id, texts=len(self._part)
            )
            self.summary = replace(answer, results=[])
            yield from enumerate(answer.results, self._part.start)
            return
        for line in self._lines.end():
            yield from self._take(line)
        if self.summary is None or self._open:
            raise InvalidAnswerError(
                f"the stream ended after {len(self._part) - len(self._open):,} of {len(self._part):,} results"
                f"{' and without its last line' if self.summary is None else ''}; send the rest again",
                request_id=self._request_id,
            )

    def _take(self, line: bytes) -> Iterator[Indexed]:
        if not line.strip():
            return
        value = parse_json(line, self._request_id)
        if "error" in value:
            raise refusal(None, value, request_id=self._request_id)
        if self.summary is not None:
            raise InvalidAnswerError("the stream goes on after its last line", request_id=self._request_id)
        if "index" not in value:
            self.summary = ClassifyResponse(
                [],
                warning_list(value, self._request_id),
                model_identity(value, self._request_id),
                usage(value, self._request_id),
            )
            return
        index = value.pop("index")
        if not isinstance(index, int) or isinstance(index, bool) or index not in self._open:
            raise InvalidAnswerError(
                f"the stream has a result for text {index!r}, which is none of those that are open",
                request_id=self._request_id,
            )
        self._open.remove(index)
        yield self._part.start + index, classification(value, [], self._request_id)


class StreamSummary:
    """What a stream's results share, known once it has ended."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._parts: list[Part] = []
        self._summaries: list[ClassifyResponse] = []
        self._whole: ClassifyResponse | None = None
        self._ended = False

    def add(self, part: Part, streamed: StreamedPart) -> None:
        """Keeps what the end of a part's answer said; raises `FingerprintMismatchError` at a change of model."""
        if streamed.summary is not None:
            self._parts.append(part)
            self._summaries.append(streamed.summary)
            self._whole = joined(self._question, self._parts, self._summaries)

    def finish(self, whole: ClassifyResponse | None = None) -> None:
        """Makes `warnings`, `model` and `usage` readable; whole: what to say of a call without any part."""
        self._whole = self._whole or whole
        self._ended = True

    @property
    def warnings(self) -> list[Warning_]:
        """Of labels and texts, with places in what the caller gave."""
        return self._known().warnings

    @property
    def model(self) -> ModelIdentity:
        """Which model gave the scores."""
        return self._known().model

    @property
    def usage(self) -> Usage:
        """What the call cost."""
        return self._known().usage

    def _known(self) -> ClassifyResponse:
        if self._whole is None or not self._ended:
            raise RuntimeError("a stream says what its results share at its end; read all results first")
        return self._whole
