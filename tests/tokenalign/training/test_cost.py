"""What a head costs."""

import json
from pathlib import Path

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.labels import LabelSet
from tokenalign.training.cost import TIMED_TEXTS, measure_cost, peak_memory_bytes

LABELS = LabelSet.of(["card", "cash", "payment"])


def test_the_cost_of_a_head(bert_classifier: TokenAlignClassifier, bert_head: Path) -> None:
    """Texts are timed up to a limit, and sizes are those of the head's file and of its tensors."""
    found = measure_cost(bert_classifier, bert_head, ["my card was declined"] * (TIMED_TEXTS + 9), LABELS)
    assert (found.device, found.texts, found.labels) == ("cpu", TIMED_TEXTS, 3)
    assert found.texts_per_s > 0
    assert found.head_bytes == (bert_head / "model.safetensors").stat().st_size
    assert found.head_parameters == sum(parameter.numel() for parameter in bert_classifier.head.parameters())
    assert found.peak_device_bytes is None
    assert found.peak_memory_bytes is not None
    json.dumps(found.as_dict())


def test_the_peak_never_falls() -> None:
    """It is in bytes, holds what the process once held, and stays when that is given back."""
    before = peak_memory_bytes()
    assert before is not None
    assert 2**24 < before < 2**40
    held = bytearray(2**27)
    held[:: 2**12] = b"x" * len(held[:: 2**12])  # every page of it
    peak = peak_memory_bytes()
    del held
    assert peak is not None
    assert peak_memory_bytes() == peak >= before
