"""The step that leaves out layers: a folder in, a fresh folder out."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tokenalign.compression.counting import Counts, count_model
from tokenalign.compression.layers import keep_layers
from tokenalign.compression.manifest import read_manifest, write_manifest
from tokenalign.compression.model_folder import (
    Source,
    check_fresh,
    copy_tokenizer,
    load_text_model,
    save_text_model,
)


def cut_layers(source: Source, kept: Sequence[int], output: Path, dtype: torch.dtype | None = torch.bfloat16) -> Counts:
    """Write a model of the kept layers to the fresh folder `output`; its counts.

    dtype: of the file, by default bfloat16 as on the cards; None for that of the source
    Raises `CompressionError` or `BackboneError` before anything is written.
    """
    check_fresh(output)
    read_manifest(source.folder)
    student = keep_layers(load_text_model(source.folder, dtype), kept)
    counts = count_model(student.model, student.model.dtype)
    save_text_model(output, student)
    copy_tokenizer(source.folder, output)
    facts = {"layers": list(kept), "dtype": str(student.model.dtype), "counts": counts.record()}
    write_manifest(
        output,
        "layers",
        {"source": source.folder},
        facts,
        before=source.folder,
        references={"source": source.named},
    )
    return counts
