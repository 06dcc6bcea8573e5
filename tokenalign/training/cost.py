"""What a head costs where it runs: texts a second, peak memory, and the size of its files."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.labels import LabelSet
from tokenalign.references import WEIGHTS_FILE

TIMED_TEXTS = 256


@dataclass(frozen=True, slots=True)
class Cost:
    """One measurement on one machine.

    texts, labels: how many were scored; texts_per_s: encoder and head, labels already prepared
    peak_memory_bytes: of this process so far, encoder and everything else in it included; None where the system
        doesn't tell. peak_device_bytes: of the GPU, None without one
    head_bytes: of model.safetensors; head_parameters: of the head alone
    """

    device: str
    threads: int
    texts: int
    labels: int
    texts_per_s: float
    peak_memory_bytes: int | None
    peak_device_bytes: int | None
    head_bytes: int
    head_parameters: int

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON has them."""
        return asdict(self)


def measure_cost(classifier: TokenAlignClassifier, folder: Path, texts: Sequence[str], labels: LabelSet) -> Cost:
    """The cost of scoring at most `TIMED_TEXTS` of the texts in one call, after a first one that warms up."""
    chosen = list(texts[:TIMED_TEXTS])
    classifier(chosen[:8], labels)
    started_s = time.perf_counter()
    classifier(chosen, labels)
    elapsed_s = time.perf_counter() - started_s
    on_gpu = classifier.backbone.device.type == "cuda"
    return Cost(
        device=str(classifier.backbone.device),
        threads=torch.get_num_threads(),
        texts=len(chosen),
        labels=len(labels),
        texts_per_s=len(chosen) / elapsed_s,
        peak_memory_bytes=peak_memory_bytes(),
        peak_device_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        head_bytes=(folder / WEIGHTS_FILE).stat().st_size,
        head_parameters=sum(parameter.numel() for parameter in classifier.head.parameters()),
    )


def peak_memory_bytes() -> int | None:
    """The most memory that this process has held at a time; None where the system doesn't tell."""
    if os.name != "posix":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
