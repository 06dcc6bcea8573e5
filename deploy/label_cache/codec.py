"""The bytes of a cache entry: label rows, packed, with a checksum over key and value.

Version 1, little-endian:

    offset  size        field
    0       4           magic "TALC"
    4       1           version, 1
    5       1           dtype: 1 = float16, 2 = float32
    6       2           signed: 0 = plain checksum, 1 = keyed with the secret
    8       4           descriptions n
    12      4           tokens t, the sum of the lengths
    16      4           width w
    20      4 n         lengths, int32, each at least 1
    20+4n   t w (2|4)   rows
    end-16  16          blake2b over the length of the key, the key, and all bytes before

An entry is data from outside: it is never unpickled, its sizes are compared with what was asked for before anything is
allocated, and the checksum covers the key, so that the value of another key is refused as well.
"""

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tokenalign.errors import NumericalError, TokenAlignError
from tokenalign.tokens import offsets_of, ragged_positions

MAGIC = b"TALC"
VERSION = 1

_HEADER = struct.Struct("<4sBBHIII")
_DIGEST_BYTES = 16
_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f2"), 2: np.dtype("<f4")}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

CodecReason = Literal[
    "short", "magic", "version", "unsigned", "dtype", "shape", "length", "checksum", "lengths", "nonfinite"
]
CODEC_REASONS: tuple[str, ...] = get_args(CodecReason)


class CodecError(TokenAlignError, ValueError):
    """Bytes are not an intact entry for this key; `reason` is one word for a counter."""

    def __init__(self, reason: CodecReason, message: str) -> None:
        super().__init__(reason, message)
        self.reason: CodecReason = reason
        self.message = message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True, eq=False)
class LabelRows:
    """The rows of some label descriptions behind each other, without padding.

    values: `[tokens, width]` float16, or float32 where float16 would overflow; read-only when decoded or joined
    lengths: `[descriptions]` int32, rows of each description, at least one
    """

    values: NDArray[Any]
    lengths: NDArray[np.int32]

    def __post_init__(self) -> None:
        if self.values.dtype not in (np.float16, np.float32) or self.values.ndim != 2:
            raise ValueError(
                f"label rows must be a [tokens, width] array of float16 or float32, "
                f"not {self.values.dtype} of shape {self.values.shape}"
            )
        if self.lengths.dtype != np.int32 or self.lengths.ndim != 1 or not self.lengths.size:
            raise ValueError(
                f"lengths must be a [descriptions] array of int32 with at least one entry, "
                f"not {self.lengths.dtype} of shape {self.lengths.shape}"
            )
        if self.lengths.min() < 1 or int(self.lengths.sum(dtype=np.int64)) != len(self.values):
            raise ValueError(
                f"lengths must each be at least 1 and sum to the {len(self.values)} rows; "
                f"the smallest is {self.lengths.min()}, the sum {self.lengths.sum(dtype=np.int64)}"
            )

    def __len__(self) -> int:
        """The number of descriptions."""
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Numbers in one row."""
        return int(self.values.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes that both arrays take."""
        return self.values.nbytes + self.lengths.nbytes

    def take(self, order: Sequence[int] | NDArray[np.integer[Any]]) -> "LabelRows":
        """The descriptions at `order`, in that order; repeats are allowed."""
        chosen = np.asarray(order, dtype=np.int64)
        if len(chosen) == len(self) and np.array_equal(chosen, np.arange(len(self))):
            return self
        positions = ragged_positions(offsets_of(self.lengths)[chosen], self.lengths[chosen])
        return LabelRows(self.values[positions], self.lengths[chosen])

    def split(self) -> "list[LabelRows]":
        """One `LabelRows` per description, as views on the same memory."""
        offsets = offsets_of(self.lengths).tolist()
        return [LabelRows(self.values[offsets[i] : offsets[i + 1]], self.lengths[i : i + 1]) for i in range(len(self))]

    @staticmethod
    def join(parts: "Sequence[LabelRows]") -> "LabelRows":
        """All descriptions of all parts, in order, read-only; float32 as soon as one part is.

        At least one part, and all of one width.
        """
        values = np.concatenate([part.values for part in parts])
        values.setflags(write=False)
        return LabelRows(values, np.concatenate([part.lengths for part in parts]))


def encode_rows(key: bytes | str, rows: LabelRows, secret: bytes | None) -> bytes:
    """The entry for `rows` under `key`: float16 where that holds every value, else float32.

    Raises `NumericalError` when a value is NaN or infinite: such rows must never be stored.
    """
    values = _narrow(rows.values)
    header = _HEADER.pack(
        MAGIC, VERSION, _CODES[values.dtype], int(secret is not None), len(rows), len(values), rows.width
    )
    body = b"".join((header, rows.lengths.astype("<i4", copy=False).tobytes(), values.tobytes()))
    return body + _digest(key, body, secret)


def decode_rows(key: bytes | str, data: bytes, secret: bytes | None, *, width: int, descriptions: int) -> LabelRows:
    """The rows that `encode_rows` packed for `key`, as read-only arrays over `data`.

    Raises `CodecError` when `data` is anything but an intact entry for this key, this secret, `descriptions`
    descriptions and rows of `width` numbers.
    """
    code = _check_header(data, width, descriptions, signed=secret is not None)
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if not hmac.compare_digest(digest, _digest(key, body, secret)):
        raise CodecError("checksum", "the checksum does not fit key and value: damaged, of another key, or not ours")
    lengths = np.frombuffer(data, dtype="<i4", count=descriptions, offset=_HEADER.size).astype(np.int32, copy=False)
    tokens = (len(body) - _HEADER.size - lengths.nbytes) // (width * _DTYPES[code].itemsize)
    if lengths.min() < 1 or int(lengths.sum(dtype=np.int64)) != tokens:
        raise CodecError("lengths", f"the lengths must each be at least 1 and sum to the {tokens} rows of the entry")
    packed = np.frombuffer(data, _DTYPES[code], count=tokens * width, offset=_HEADER.size + lengths.nbytes)
    values = packed.astype(packed.dtype.newbyteorder("="), copy=False).reshape(tokens, width)
    if not np.isfinite(values).all():
        raise CodecError("nonfinite", "the entry holds NaN or infinity")
    return LabelRows(values, lengths)


def _check_header(data: bytes, width: int, descriptions: int, *, signed: bool) -> int:
    """The dtype code, once every size in the header agrees with what was asked for and with the bytes at hand."""
    if len(data) < _HEADER.size + _DIGEST_BYTES:
        raise CodecError("short", f"{len(data)} bytes are fewer than the {_HEADER.size + _DIGEST_BYTES} of any entry")
    magic, version, code, keyed, got_descriptions, tokens, got_width = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CodecError("magic", f"the entry starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise CodecError("version", f"the entry has version {version}, this program reads {VERSION}")
    if keyed != int(signed):
        raise CodecError("unsigned", "exactly one of writer and reader has a secret; give all replicas the same one")
    if code not in _DTYPES:
        raise CodecError("dtype", f"dtype code {code} is none of {sorted(_DTYPES)}")
    if (got_descriptions, got_width) != (descriptions, width):
        raise CodecError(
            "shape",
            f"the entry has {got_descriptions} descriptions of width {got_width}, not {descriptions} of {width}",
        )
    size = _HEADER.size + 4 * descriptions + tokens * width * _DTYPES[code].itemsize + _DIGEST_BYTES
    if len(data) != size:
        raise CodecError("length", f"the entry has {len(data)} bytes, its header says {size}")
    return int(code)


def _narrow(values: NDArray[Any]) -> NDArray[Any]:
    """`values` as little-endian float16 where no value overflows, else float32.

    Raises `NumericalError` unless all are finite.
    """
    finite = np.isfinite(values)
    if not finite.all():
        row = int(np.flatnonzero(~finite.all(axis=1))[0])
        raise NumericalError(f"label row {row} holds NaN or infinity; it is neither stored nor scored")
    if values.dtype == np.float32:
        with np.errstate(over="ignore"):
            halves = values.astype("<f2")
        return halves if np.isfinite(halves).all() else values.astype("<f4", copy=False)
    return values.astype("<f2", copy=False)


def _digest(key: bytes | str, body: bytes, secret: bytes | None) -> bytes:
    name = key.encode("utf-8") if isinstance(key, str) else key
    mac = hashlib.blake2b(len(name).to_bytes(8, "little"), digest_size=_DIGEST_BYTES, key=_mac_key(secret))
    mac.update(name)
    mac.update(body)
    return mac.digest()


def _mac_key(secret: bytes | None) -> bytes:
    """32 bytes for blake2b, which takes a key of at most 64 while a secret may be longer; none without a secret."""
    if secret is None:
        return b""
    if not secret:
        raise ValueError("the label cache's secret is empty; give at least one byte, or none at all (null)")
    return hashlib.sha256(secret).digest()
