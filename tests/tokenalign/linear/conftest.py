"""Linear heads with random weights on the tiny backbones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenalign.linear import LinearClassifier
from tokenalign.linear.config import LinearConfig
from tokenalign.linear.head import LinearHead
from tokenalign.linear.weights import save_linear
from tokenalign.references import sha256_of

MakeLinear = Callable[..., Path]
CHOICE = {"threshold": 0.5, "texts": 60, "resamples": 100, "low": 0.45, "high": 0.55, "lowest": 0.4, "highest": 0.6}


@pytest.fixture(scope="session")
def make_linear(tmp_path_factory: pytest.TempPathFactory) -> MakeLinear:
    """Makes the folder of a random linear head on a backbone's folder; keywords override its configuration."""

    def make(backbone: Path, /, **overrides: Any) -> Path:
        import json

        import torch

        values: dict[str, Any] = {
            "name": "tiny",
            "backbone": {"reference": str(backbone), "sha256": sha256_of(backbone / "model.safetensors")},
            "backbone_width": json.loads((backbone / "config.json").read_text())["hidden_size"],
            "labels": ["card", "cash", "loan"],
            "mode": "multi_label",
            "pooling": "mean",
            "window": 16,
            "stride": 8,
        }
        values |= overrides
        if values["mode"] == "multi_label":
            values.setdefault("threshold", CHOICE)
        config = LinearConfig.parse(values)
        torch.manual_seed(5)
        folder = tmp_path_factory.mktemp("linear")
        save_linear(folder, config, LinearHead(config.backbone_width, len(config.labels)))
        return folder

    return make


@pytest.fixture(scope="session")
def multi_label(make_linear: MakeLinear, bert_backbone: Path) -> LinearClassifier:
    """A head of several labels a text, on the tiny BERT."""
    return LinearClassifier.from_pretrained(make_linear(bert_backbone), device="cpu")


@pytest.fixture(scope="session")
def single_label(make_linear: MakeLinear, bert_backbone: Path) -> LinearClassifier:
    """A head of one label a text, on the tiny BERT."""
    return LinearClassifier.from_pretrained(make_linear(bert_backbone, mode="single_label"), device="cpu")
