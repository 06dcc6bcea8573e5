"""What must hold of any bytes that a label cache's store may give back: they are an intact entry, or a `CodecError`.

Random bytes never have a checksum that fits, so they are given one too, and a header, to come further into the decoder.
"""

import hashlib
import struct
from collections.abc import Iterator

import numpy as np

from deploy.label_cache.codec import CODEC_REASONS, MAGIC, VERSION, CodecError, LabelRows, decode_rows, encode_rows

KEY = b"tokenalign:1:f1:label:00ff"
WIDTH = 3
AS_IT_IS, SEALED, FLOAT16, FLOAT32 = range(4)

_HEADER = struct.Struct("<4sBBHIII")


def check_bytes(data: bytes) -> str:
    """How an entry ends that is made of `data`: "rows", or the reason of the refusal; other errors are defects.

    The first byte says how the entry is made of what is behind the second, and that one how many descriptions it is to
    have.
    """
    if len(data) < 2:
        return "short"
    way, descriptions, rest = data[0] % 4, 1 + data[1] % 4, data[2:]
    if way == AS_IT_IS:
        entry = rest
    elif way == SEALED:
        entry = sealed(rest)
    else:
        entry = sealed(_with_header(1 if way == FLOAT16 else 2, descriptions, rest))
    return check_entry(entry, descriptions)


def check_entry(entry: bytes, descriptions: int) -> str:
    """ "rows" or the reason of the refusal; `AssertionError` where rows came out that are not sound."""
    try:
        rows = decode_rows(KEY, entry, None, width=WIDTH, descriptions=descriptions)
    except CodecError as error:
        return _named(error)
    assert (len(rows), rows.width) == (descriptions, WIDTH)
    assert rows.lengths.min() >= 1
    assert rows.lengths.sum(dtype=np.int64) == len(rows.values)
    assert np.isfinite(rows.values).all()
    assert not rows.values.flags.writeable
    again = decode_rows(KEY, encode_rows(KEY, rows, None), None, width=WIDTH, descriptions=descriptions)
    assert again.lengths.tolist() == rows.lengths.tolist()
    # float32 that float16 could hold was not written by us; it is rounded where it is written again.
    assert again.values.tobytes() == rows.values.astype(again.values.dtype).tobytes()
    return "rows"


def _named(error: CodecError) -> str:
    """The reason, which is one of those that are counted."""
    assert error.reason in CODEC_REASONS
    assert str(error)
    return error.reason


def sealed(body: bytes) -> bytes:
    """`body` with the checksum that fits, as a writer without a secret, but with a defect, would make it."""
    covered = len(KEY).to_bytes(8, "little") + KEY + body
    return body + hashlib.blake2b(covered, digest_size=16).digest()


def seeds() -> Iterator[bytes]:
    """Data of which `check_bytes` makes entries with rows, each in its way."""
    for way, dtype in ((AS_IT_IS, np.float16), (SEALED, np.float16), (FLOAT16, np.float16), (FLOAT32, np.float32)):
        rows = LabelRows(np.full((3, WIDTH), 65_504, dtype), np.array([1, 2], np.int32))
        entry = encode_rows(KEY, rows, None)
        kept = {AS_IT_IS: entry, SEALED: entry[:-16]}.get(way, entry[_HEADER.size : -16])
        if way == FLOAT32:
            kept = rows.lengths.tobytes() + rows.values.tobytes()
        yield bytes([way, 1]) + kept


def _with_header(code: int, descriptions: int, rest: bytes) -> bytes:
    """A header that fits what is asked for and what is behind it: lengths and rows, cut or filled up to whole rows."""
    row_bytes = WIDTH * (2 if code == 1 else 4)
    tokens = max(0, len(rest) - 4 * descriptions) // row_bytes
    body = rest[: 4 * descriptions + tokens * row_bytes].ljust(4 * descriptions, b"\0")
    return _HEADER.pack(MAGIC, VERSION, code, 0, descriptions, tokens, WIDTH) + body
