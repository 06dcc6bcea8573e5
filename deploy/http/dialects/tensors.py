"""Tensors of the open inference protocol: as JSON, and as bytes behind the JSON (its binary tensor data extension)."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deploy.http.dialects.fields import Fields, array, string
from deploy.http.limits import MAX_NUMBER_DIGITS
from tokenalign.errors import InputError, Loc

HEADER_LENGTH = "Inference-Header-Content-Length"
"""The HTTP header with the bytes of the JSON, where tensors follow it in binary."""

BINARY_SIZE = "binary_data_size"
MAX_DIMENSIONS = 2
MAX_DIMENSION = 2**31 - 1

_LENGTH = struct.Struct("<I")
_FP32 = struct.Struct("<f")


@dataclass(frozen=True, slots=True)
class TextTensor:
    """An input of strings, row by row, and where in the request each of them stands.

    shape: one or two dimensions; nested: whether the data was sent as a list of rows
    """

    name: str
    shape: tuple[int, ...]
    values: tuple[str, ...]
    loc: Loc
    nested: bool

    def at(self, i: int) -> Loc:
        """Where the string number `i` stands."""
        return (*self.loc, "data", *(divmod(i, self.shape[1]) if self.nested else (i,)))

    def rows(self) -> list[list[str]]:
        """The rows of a tensor of two dimensions."""
        width = self.shape[1]
        return [list(self.values[start : start + width]) for start in range(0, len(self.values), width)]


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """An output: strings (BYTES) or numbers (FP32), row by row."""

    name: str
    datatype: Literal["BYTES", "FP32"]
    shape: tuple[int, ...]
    values: Sequence[str] | Sequence[float]

    def json(self) -> dict[str, Any]:
        """The output with its data."""
        return {**self._head(), "data": list(self.values)}

    def binary(self) -> tuple[dict[str, Any], bytes]:
        """The output without its data, and the data in bytes."""
        data = b"".join(_encoded(value) for value in self.values)
        return {**self._head(), "parameters": {BINARY_SIZE: len(data)}}, data

    def _head(self) -> dict[str, Any]:
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


class BinaryTail:
    """The bytes behind the JSON of a request, taken tensor by tensor in their order."""

    def __init__(self, data: bytes) -> None:
        self._data, self._taken = data, 0

    def take(self, size: int, loc: Loc) -> bytes:
        """The next `size` bytes; `InputError` where there are fewer."""
        left = len(self._data) - self._taken
        if size > left:
            raise InputError(f"is {size:,}, but {left:,} bytes are left behind the JSON; send all of the data", loc)
        taken = self._data[self._taken : self._taken + size]
        self._taken += size
        return taken

    def close(self) -> None:
        """`InputError` where bytes are left that belong to no tensor."""
        left = len(self._data) - self._taken
        if left:
            raise InputError(
                f"{left:,} bytes behind the JSON belong to no input; name them in {BINARY_SIZE}", ("inputs",)
            )


def split_body(body: bytes, header_length: str | None) -> tuple[bytes, BinaryTail]:
    """The JSON of a request, and the bytes behind it; header_length: the value of `HEADER_LENGTH`, if it was sent."""
    if header_length is None:
        return body, BinaryTail(b"")
    if not (header_length.isascii() and header_length.isdecimal() and len(header_length) <= MAX_NUMBER_DIGITS):
        raise InputError(f"{HEADER_LENGTH} must be the number of bytes of the JSON; leave it out without binary data")
    size = int(header_length)
    if size > len(body):
        raise InputError(
            f"{HEADER_LENGTH} is more than the {len(body):,} bytes of the body; send the bytes of the JSON"
        )
    return body[:size], BinaryTail(body[size:])


def read_text_tensor(item: object, tail: BinaryTail, loc: Loc) -> TextTensor:
    """The input of strings in `item`, whose binary data, if it has some, is next in `tail`."""
    fields = Fields(item, ("name", "shape", "datatype", "parameters", "data"), loc)
    name = string(fields.required("name", "the input's name"), fields.at("name"))
    datatype = fields.required("datatype", "BYTES")
    if datatype != "BYTES":
        raise InputError("must be BYTES: texts and labels are strings", fields.at("datatype"))
    shape = _shape(fields)
    parameters = fields.nested("parameters", (BINARY_SIZE,))
    size = parameters.whole(BINARY_SIZE)
    if size is not None:
        if "data" in fields:
            raise InputError(f"is given as well as {BINARY_SIZE}; send one of them", fields.at("data"))
        if size < 0:
            raise InputError("must not be negative", parameters.at(BINARY_SIZE))
        values, nested = _decoded(tail.take(size, parameters.at(BINARY_SIZE)), loc), False
    else:
        values, nested = _json_values(fields, shape)
    if len(values) != math.prod(shape):
        raise InputError(
            f"has {len(values):,} strings, its shape {list(shape)} says {math.prod(shape):,}; correct one of them",
            fields.at("data"),
        )
    return TextTensor(name, shape, tuple(values), loc, nested)


def _shape(fields: Fields) -> tuple[int, ...]:
    shape = array(fields.required("shape", "the shape as a list of numbers"), fields.at("shape"), "dimensions")
    if len(shape) > MAX_DIMENSIONS:
        raise InputError(f"has {len(shape):,} dimensions, at most {MAX_DIMENSIONS} allowed", fields.at("shape"))
    for i, size in enumerate(shape):
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_DIMENSION:
            raise InputError(f"must be a whole number from 1 to {MAX_DIMENSION:,}", (*fields.at("shape"), i))
    return tuple(shape)


def _json_values(fields: Fields, shape: tuple[int, ...]) -> tuple[list[str], bool]:
    """The strings of `data`, flat or as a list of rows, and whether it was the latter."""
    loc = fields.at("data")
    data = array(fields.required("data", "the strings as a list"), loc, "strings")
    if len(shape) == 1 or not isinstance(data[0], list):
        return [string(value, (*loc, i)) for i, value in enumerate(data)], False
    values: list[str] = []
    for i, row in enumerate(data):
        items = array(row, (*loc, i), "strings")
        if len(items) != shape[1]:
            raise InputError(f"has {len(items):,} strings, the shape says {shape[1]:,}; correct one", (*loc, i))
        values += [string(value, (*loc, i, j)) for j, value in enumerate(items)]
    return values, True


def _decoded(data: bytes, loc: Loc) -> list[str]:
    """The strings in binary data: each its length in 4 bytes, little end first, and its UTF-8."""
    values: list[str] = []
    start = 0
    while start < len(data):
        place = (*loc, "data", len(values))
        content = start + _LENGTH.size
        if content > len(data):
            raise InputError("ends within the length of a string; send all of the data", place)
        end = content + _LENGTH.unpack_from(data, start)[0]
        if end > len(data):
            raise InputError(f"is longer than {BINARY_SIZE} allows; correct its length", place)
        try:
            values.append(data[content:end].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(f"is no UTF-8: {error.reason} at byte {error.start}; encode it as UTF-8", place) from error
        start = end
    return values


def _encoded(value: str | float) -> bytes:
    if isinstance(value, str):
        data = value.encode("utf-8")
        return _LENGTH.pack(len(data)) + data
    return _FP32.pack(value)
