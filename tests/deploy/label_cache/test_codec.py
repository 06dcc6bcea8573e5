"""Entries survive a round trip exactly, and nothing else is ever taken for one."""

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from deploy.label_cache.codec import CodecError, LabelRows, decode_rows, encode_rows
from tests.fuzz.entries import check_bytes, seeds
from tokenalign.errors import NumericalError

KEY = "tokenalign:1:f1:label:00ff"
SECRET = b"not a real secret"


def rows_of(lengths: list[int], width: int = 3, dtype: type = np.float16, seed: int = 0) -> LabelRows:
    values: NDArray[Any] = np.random.default_rng(seed).standard_normal((sum(lengths), width)).astype(dtype)
    return LabelRows(values, np.array(lengths, dtype=np.int32))


def reason_of(
    data: bytes, *, key: str = KEY, secret: bytes | None = None, width: int = 3, descriptions: int = 2
) -> str:
    with pytest.raises(CodecError) as caught:
        decode_rows(key, data, secret, width=width, descriptions=descriptions)
    assert str(caught.value)
    return caught.value.reason


def resealed(data: bytes) -> bytes:
    """`data` with a checksum that fits, as a writer with a defect would make it."""
    covered = len(KEY).to_bytes(8, "little") + KEY.encode() + data[:-16]
    return data[:-16] + hashlib.blake2b(covered, digest_size=16).digest()


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    width=st.integers(1, 8),
    dtype=st.sampled_from([np.float16, np.float32]),
    secret=st.sampled_from([None, SECRET]),
    data=st.data(),
)
def test_round_trip(lengths: list[int], width: int, dtype: type, secret: bytes | None, data: st.DataObject) -> None:
    """float16 comes back bit for bit; float32 within float16's rounding, or bit for bit where float16 overflows."""
    floats = st.floats(width=16 if dtype is np.float16 else 32, allow_nan=False, allow_infinity=False)
    values = data.draw(hnp.arrays(dtype, (sum(lengths), width), elements=floats))
    rows = LabelRows(values, np.array(lengths, dtype=np.int32))

    back = decode_rows(KEY, encode_rows(KEY, rows, secret), secret, width=width, descriptions=len(lengths))

    assert back.lengths.tolist() == lengths
    if dtype is np.float16 or np.abs(values).max() >= 65520:
        assert back.values.dtype == values.dtype
        assert back.values.tobytes() == values.tobytes()
    else:
        assert back.values.dtype == np.float16
        # Half a unit in the last place: 2^-11 relative, or 2^-25 absolute below float16's normal numbers.
        np.testing.assert_allclose(back.values.astype(np.float64), values.astype(np.float64), rtol=2**-11, atol=2**-25)


def test_a_second_round_trip_changes_nothing() -> None:
    """Rows that came out of the codec go through it unchanged, so a hit and a miss give the same numbers."""
    rows = rows_of([2, 1], dtype=np.float32)
    once = decode_rows(KEY, encode_rows(KEY, rows, None), None, width=3, descriptions=2)
    assert encode_rows(KEY, once, None) == encode_rows(KEY, rows, None)


def test_golden_bytes_of_version_1() -> None:
    """Another release reads what this one writes: the bytes of version 1 never change."""
    rows = LabelRows(np.array([[1.0, -2.0], [0.5, 65504.0], [0.0, 6e-8]], dtype=np.float16), np.array([2, 1], np.int32))
    body = bytes.fromhex("54414c43 01 01 0000 02000000 03000000 02000000 02000000 01000000 003c00c0 0038ff7b 00000100")
    signed = body[:6] + b"\x01\x00" + body[8:]
    assert encode_rows("k", rows, None) == body + bytes.fromhex("6a1e937a6db58181add8ebe2644557d3")
    assert encode_rows("k", rows, SECRET) == signed + bytes.fromhex("37e2742a7e9ada96284b9010c5564f61")


def test_golden_bytes_of_float32() -> None:
    """One value beyond float16 makes the whole entry float32."""
    rows = LabelRows(np.array([[1.0, 1e6]], dtype=np.float32), np.array([1], dtype=np.int32))
    data = encode_rows("k", rows, None)
    assert data[:-16] == bytes.fromhex("54414c43 01 02 0000 01000000 01000000 02000000 01000000 0000803f 00247449")


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_flipped_bit_at_any_position_is_detected(secret: bytes | None) -> None:
    """No single flipped bit of an entry goes unnoticed."""
    data = encode_rows(KEY, rows_of([2, 1]), secret)
    for position in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CodecError):
            decode_rows(KEY, bytes(damaged), secret, width=3, descriptions=2)


@given(
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    at=st.integers(0),
    bit=st.integers(0, 7),
    secret=st.sampled_from([None, SECRET]),
)
def test_any_entry_with_a_flipped_bit_is_refused(
    lengths: list[int], seed: int, at: int, bit: int, secret: bytes | None
) -> None:
    """Of whatever size the entry is."""
    damaged = bytearray(encode_rows(KEY, rows_of(lengths, seed=seed), secret))
    damaged[at % len(damaged)] ^= 1 << bit
    with pytest.raises(CodecError):
        decode_rows(KEY, bytes(damaged), secret, width=3, descriptions=len(lengths))


@settings(max_examples=300)
@given(data=st.binary(max_size=160))
def test_any_bytes_are_rows_or_a_named_refusal(data: bytes) -> None:
    """Also behind a header and under a checksum that fit: nothing but `CodecError` is raised, and rows are sound."""
    assert check_bytes(data)


@settings(max_examples=300)
@given(seed=st.sampled_from(list(seeds())), at=st.integers(2, 100), cut=st.integers(0, 12), put=st.binary(max_size=12))
def test_any_change_of_an_entry_is_rows_or_a_named_refusal(seed: bytes, at: int, cut: int, put: bytes) -> None:
    """Likewise for bytes that are nearly an entry, with a checksum that fits what was made of them."""
    assert check_bytes(seed) == "rows"
    assert check_bytes(seed[:at] + put + seed[at + cut :])


def test_every_truncation_is_detected() -> None:
    """No prefix of an entry, nor one with bytes behind it, passes."""
    data = encode_rows(KEY, rows_of([2, 1]), None)
    reasons = {reason_of(data[:size]) for size in range(len(data))}
    assert reasons == {"short", "length"}
    assert reason_of(data + b"\x00") == "length"


def test_an_entry_of_another_key_is_refused() -> None:
    """A value replayed under another key is not taken, with or without a secret, even where the key's end moved."""
    for secret in (None, SECRET):
        data = encode_rows(KEY, rows_of([2, 1]), secret)
        assert reason_of(data, key=KEY[:-1], secret=secret) == "checksum"
        assert reason_of(data, key=KEY + "T", secret=secret) == "checksum"


def test_with_a_secret_an_entry_without_it_is_refused() -> None:
    """Whoever can write to the store, but doesn't know the secret, can't plant rows."""
    plain, signed = encode_rows(KEY, rows_of([2, 1]), None), encode_rows(KEY, rows_of([2, 1]), SECRET)
    assert reason_of(plain, secret=SECRET) == "unsigned"
    assert reason_of(plain[:6] + b"\x01\x00" + plain[8:], secret=SECRET) == "checksum"
    assert reason_of(signed, secret=b"another") == "checksum"
    assert reason_of(signed) == "unsigned"


def test_an_empty_secret_is_refused() -> None:
    """An empty secret file must not silently switch signing off."""
    with pytest.raises(ValueError, match="empty"):
        encode_rows(KEY, rows_of([1]), b"")


def test_a_secret_longer_than_blake2b_takes_is_fine() -> None:
    """Secrets of any length work, and all their bytes count."""
    long = bytes(range(100))
    data = encode_rows(KEY, rows_of([2, 1]), long)
    assert len(decode_rows(KEY, data, long, width=3, descriptions=2)) == 2
    assert reason_of(data, secret=long[:-1]) == "checksum"


def test_foreign_and_mismatched_entries_have_their_own_reasons() -> None:
    """Each way in which an entry can be wrong is counted under its own word."""
    data = encode_rows(KEY, rows_of([2, 1]), None)
    assert reason_of(b"") == "short"
    assert reason_of(b"\x80\x05" + b"pickled, or anything else that is long enough") == "magic"
    assert reason_of(resealed(data[:4] + b"\x02" + data[5:])) == "version"
    assert reason_of(resealed(data[:5] + b"\x07" + data[6:])) == "dtype"
    assert reason_of(data, width=4) == "shape"
    assert reason_of(data, descriptions=3) == "shape"


def test_lengths_that_do_not_fit_the_rows_are_refused() -> None:
    """A wrong split of the rows would score another label's tokens, even where the checksum fits."""
    data = encode_rows(KEY, rows_of([2, 1]), None)
    for lengths in ((3, 0), (2, 2), (-1, 4)):
        assert reason_of(resealed(data[:20] + struct.pack("<2i", *lengths) + data[28:])) == "lengths"


def test_an_entry_with_nan_is_refused() -> None:
    """NaN in a sealed entry is not handed out."""
    data = encode_rows(KEY, rows_of([2, 1]), None)
    assert reason_of(resealed(data[:28] + b"\x00\x7e" + data[30:])) == "nonfinite"


def test_huge_sizes_in_the_header_allocate_nothing() -> None:
    """A header that claims 2^32-1 rows is refused by comparing numbers, before any allocation."""
    header = struct.pack("<4sBBHIII", b"TALC", 1, 2, 0, 2, 2**32 - 1, 2**32 - 1)
    assert reason_of(header + bytes(64), width=2**32 - 1) == "length"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rows_that_are_not_finite_are_never_written(bad: float, dtype: type) -> None:
    """NaN and infinity are an error that names the row."""
    rows = rows_of([2, 1], dtype=dtype)
    rows.values[1, 2] = bad
    with pytest.raises(NumericalError, match="row 1"):
        encode_rows(KEY, rows, None)


@pytest.mark.parametrize(
    ("values", "lengths"),
    [
        (np.zeros((3, 2), np.float64), [2, 1]),
        (np.zeros(3, np.float16), [2, 1]),
        (np.zeros((3, 2), np.float16), [2, 2]),
        (np.zeros((3, 2), np.float16), [3, 0]),
        (np.zeros((0, 2), np.float16), []),
    ],
)
def test_rows_and_lengths_must_fit(values: NDArray[Any], lengths: list[int]) -> None:
    """`LabelRows` can't be built from arrays that don't fit each other, nor with a description without rows."""
    with pytest.raises(ValueError, match=r"label rows|lengths"):
        LabelRows(values, np.array(lengths, dtype=np.int32))


def test_take_split_and_join() -> None:
    """Rows stay with their description through every rearrangement."""
    rows = rows_of([2, 1, 3])
    parts = rows.split()
    taken = rows.take([2, 0, 2])
    assert taken.lengths.tolist() == [3, 2, 3]
    assert taken.values.tobytes() == b"".join(parts[i].values.tobytes() for i in (2, 0, 2))
    assert LabelRows.join(parts).values.tobytes() == rows.values.tobytes()
    assert rows.take([0, 1, 2]) is rows


def test_decoded_rows_are_read_only() -> None:
    """Rows in the memory tier are shared by requests, so none may change them."""
    back = decode_rows(KEY, encode_rows(KEY, rows_of([2, 1]), None), None, width=3, descriptions=2)
    with pytest.raises(ValueError, match="read-only"):
        back.values[0, 0] = 1
