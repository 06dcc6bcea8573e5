"""The size of a safetensors file before it is written."""

import json
from collections.abc import Mapping, Sequence
from math import prod

import torch

METADATA = {"format": "pt"}  # what transformers writes
DTYPE_CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_ALIGNMENT = 8  # the header is filled up with spaces
_LENGTH_BYTES = 8  # of the header, in front of it


def safetensors_bytes(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> int:
    """Bytes of the file that transformers writes for tensors of these names and shapes, all of one dtype.

    The file is the header's length, a JSON header that names each tensor's dtype, shape and place, and the values.
    """
    header: dict[str, object] = {"__metadata__": METADATA}
    end = 0
    for name in sorted(shapes):
        start, end = end, end + prod(shapes[name]) * dtype.itemsize
        header[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shapes[name]), "data_offsets": [start, end]}
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return _LENGTH_BYTES + length + -length % _ALIGNMENT + end
