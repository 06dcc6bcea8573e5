"""Bodies: bounded while they stream, then one JSON object, each mistake with its place."""

import asyncio
import json
import sys
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from deploy.http.errors import BodyTooLargeError, SlowBodyError
from deploy.http.limits import parse_json_object, read_body
from deploy.settings import LimitSettings
from tokenalign.errors import InputError

TEN = LimitSettings.model_construct(max_body_bytes=10, max_body_s=60.0)


class Sender:
    """A client that sends chunks one after the other; counts what was taken from it."""

    def __init__(self, chunks: list[bytes], length: str | None = None, *, leaves: bool = False) -> None:
        self.chunks = chunks
        self.taken = 0
        self.leaves = leaves
        headers = [] if length is None else [(b"content-length", length.encode("latin-1"))]
        self.request = Request({"type": "http", "method": "POST", "headers": headers}, self.receive)

    async def receive(self) -> Any:
        if self.taken == len(self.chunks) and self.leaves:
            return {"type": "http.disconnect"}
        chunk = self.chunks[self.taken]
        self.taken += 1
        more = self.leaves or self.taken < len(self.chunks)
        return {"type": "http.request", "body": chunk, "more_body": more}


class TestReadBody:
    @pytest.mark.parametrize("length", [None, "10"])
    async def test_up_to_the_limit(self, length: str | None) -> None:
        """A body of exactly the limit is read whole, with or without its length ahead."""
        assert await read_body(Sender([b"01234", b"", b"56789"], length).request, TEN) == b"0123456789"

    async def test_an_announced_excess_is_not_read(self) -> None:
        """A length over the limit is refused with the numbers before a byte is taken."""
        sender = Sender([b"x" * 11], "11")
        with pytest.raises(
            BodyTooLargeError, match=r"has 11 bytes, at most 10 allowed \(limits.max_body_bytes\); send"
        ):
            await read_body(sender.request, TEN)
        assert sender.taken == 0

    @pytest.mark.parametrize("length", [None, "3", "", "many", "-1"])
    async def test_a_stream_is_refused_where_it_passes_the_limit(self, length: str | None) -> None:
        """A body without a length, or longer than it said, is read no further than the chunk that passes the limit."""
        sender = Sender([b"01234"] * 100, length)
        with pytest.raises(BodyTooLargeError, match="at most 10"):
            await read_body(sender.request, TEN)
        assert sender.taken == 3

    async def test_a_length_of_thousands_of_digits(self) -> None:
        """A length too long to be a number is over the limit."""
        digits = "9" * (sys.get_int_max_str_digits() + 1)
        with pytest.raises(BodyTooLargeError):
            await read_body(Sender([b"x"], digits).request, TEN)

    async def test_a_caller_who_leaves(self) -> None:
        """A connection that ends in the middle of a body is told from a complete one."""
        with pytest.raises(ClientDisconnect):
            await read_body(Sender([b"01234"], leaves=True).request, TEN)

    @pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "x" * 100])
    async def test_a_compressed_body_is_not_read(self, encoding: str) -> None:
        """It could grow past any limit; the encoding is named, shortened."""
        sender = Sender([b"x"])
        sender.request.scope["headers"].append((b"content-encoding", encoding.encode()))
        with pytest.raises(InputError, match=f"is compressed .'{encoding[:20]}'.*send it as it is"):
            await read_body(sender.request, TEN)
        assert sender.taken == 0

    async def test_identity_is_no_compression(self) -> None:
        """A client may say that it did nothing."""
        sender = Sender([b"x"])
        sender.request.scope["headers"].append((b"content-encoding", b"Identity"))
        assert await read_body(sender.request, TEN) == b"x"

    @pytest.mark.parametrize("begun", [[], [b"012", b"3"]])
    async def test_a_body_that_never_ends(self, begun: list[bytes]) -> None:
        """The time is that of the whole body, however much of it came; what came too late is not waited for."""
        chunks = iter(begun)

        async def receive() -> Any:
            for chunk in chunks:
                return {"type": "http.request", "body": chunk, "more_body": True}
            return await asyncio.get_running_loop().create_future()

        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        limits = LimitSettings.model_construct(max_body_bytes=10, max_body_s=0.01)
        with pytest.raises(SlowBodyError, match=r"not arrive within 0.01 s \(limits.max_body_s\); send"):
            await read_body(request, limits)


class TestParse:
    def test_an_object(self) -> None:
        """The object, with its order kept."""
        assert parse_json_object(b' {"b": 1, "a": [null, "\xc3\xbc", "\\u00fc"]} ') == {"b": 1, "a": [None, "ü", "ü"]}

    def test_a_lone_surrogate_passes(self) -> None:
        """Whether as an escape or as bytes, it reaches the check that names the field it stands in."""
        assert parse_json_object(rb'{"text": "\ud800"}') == {"text": "\ud800"}
        assert parse_json_object(b'{"text": "\xed\xa0\x80"}') == {"text": "\ud800"}

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (b"", "is empty"),
            (b"  ", "no JSON: Expecting value at line 1 column 3"),
            (b'{"text": ', "no JSON: .* line 1 column 10"),
            (b'{\n"text": "a",}', "no JSON: .* line 2"),
            (b"{'text': 'a'}", "no JSON"),
            (b'{"text": "a"} more', "Extra data"),
            (b'{"text": "a\nb"}', "control character"),
            (b"\xff\xff", "no UTF-8: .* byte 0"),
            (b'{"text": "\xff"}', "no UTF-8: .* byte 10"),
            (b'{"text": "caf\xe9"}', "no UTF-8"),
            (b"[]", "must be a JSON object, not an array"),
            (b'"text"', "must be a JSON object, not a string"),
            (b"3", "must be a JSON object, not a number"),
            (b"null", "must be a JSON object, not null"),
            (b"true", "must be a JSON object, not a boolean"),
            (b'{"top_k": NaN}', "NaN is no JSON number"),
            (b'{"top_k": -Infinity}', "-Infinity is no JSON number"),
            (b'{"top_k": ' + b"9" * 5_000 + b"}", "a number has 5,000 digits, at most 4,300"),
            (b"[" * 200_000 + b"]" * 200_000, "nested too deep"),
            (b'{"labels":' + b'{"a":' * 200_000, "nested too deep"),
        ],
    )
    def test_what_is_no_object(self, body: bytes, words: str) -> None:
        """What is wrong with the body, where there is one with line and column, and what to send instead."""
        with pytest.raises(InputError, match=words) as caught:
            parse_json_object(body)
        assert caught.value.loc == ()

    @pytest.mark.parametrize(
        ("body", "key"),
        [
            (b'{"text": "a", "labels": [], "text": "b"}', "'text'"),
            (b'{"labels": [{"name": "a", "name": "b"}]}', "'name'"),
            (b'{"a": 1, "\\u0061": 2}', "'a'"),
        ],
    )
    def test_a_key_given_twice(self, body: bytes, key: str) -> None:
        """Two values for one key are refused: any choice between them would drop one in silence."""
        with pytest.raises(InputError, match=f"key {key} is given twice"):
            parse_json_object(body)

    def test_a_long_key_given_twice_is_shortened(self) -> None:
        """An error doesn't send a long key back."""
        body = json.dumps({"k" * 10_000: 1})[:-1] + f', "{"k" * 10_000}": 2}}'
        with pytest.raises(InputError) as caught:
            parse_json_object(body.encode())
        assert len(str(caught.value)) < 300
