"""The served model's files: read as the library reads them, with the settings' word on where they are."""

from pathlib import Path
from typing import Any

import pytest

from deploy.model import ServedModel
from deploy.settings import ModelSettings
from tokenalign.backbone import Backbone
from tokenalign.errors import BackboneError, CheckpointError, ConfigError
from tokenalign.linear.config import LinearConfig
from tokenalign.references import resolve_backbone


def settings_of(**values: Any) -> ModelSettings:
    return ModelSettings(device="cpu", **values)


def test_fingerprints_are_the_librarys(any_pair: Any, bert_head: Path) -> None:
    """Scores of the service and of the library on the same files go under one name."""
    identity = any_pair.classifier.backbone.identity
    assert any_pair.served.fingerprint(identity) == any_pair.classifier.fingerprint
    assert any_pair.served.label_fingerprint(identity) != any_pair.classifier.fingerprint


def test_the_default_is_the_shipped_head(minilm: Any) -> None:
    """Without an id the head that ships with the library is served, as its own config.json says, nothing added."""
    model = ServedModel.load(settings_of())
    assert model.config == minilm.classifier.config
    assert model.head_digest == minilm.served.head_digest


def test_the_encoder_is_loaded_apart(bert_head: Path) -> None:
    """Who does not encode reads no encoder; who does gets it checked, on the device and in the dtype asked for."""
    model = ServedModel.load(settings_of(id_or_path=str(bert_head), dtype="bfloat16"))
    backbone = model.load_backbone()
    assert isinstance(backbone, Backbone)
    assert (backbone.device.type, backbone.identity.dtype) == ("cpu", "bfloat16")
    full = ServedModel.load(settings_of(id_or_path=str(bert_head)))
    assert full.fingerprint(full.load_backbone().identity) != model.fingerprint(backbone.identity)


def test_another_place_for_the_encoder(bert_head: Path, bert_backbone: Path, tmp_path: Path) -> None:
    """`backbone` takes the encoder from a folder of the user's; the head's hash must still hold."""
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in bert_backbone.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    model = ServedModel.load(settings_of(id_or_path=str(bert_head), backbone=str(moved)))
    assert resolve_backbone(model.config.backbone) == moved
    assert model.load_backbone().identity.reference == str(moved)
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match="sha256"):
        model.load_backbone()


def test_overrides_reach_the_head(bert_head: Path) -> None:
    """config_overrides change what the head's own configuration says, and with it the fingerprint."""
    plain = ServedModel.load(settings_of(id_or_path=str(bert_head)))
    changed = ServedModel.load(settings_of(id_or_path=str(bert_head), config_overrides={"temperature": 2.5}))
    assert changed.config.temperature == 2.5
    identity = plain.load_backbone().identity
    assert changed.fingerprint(identity) != plain.fingerprint(identity)


def test_the_temperature_leaves_label_rows_alone(bert_backbone: Path, make_head: Any) -> None:
    """Two temperatures of one head share their cached labels, but not their scores' name."""
    one, other = (
        ServedModel.load(settings_of(id_or_path=str(make_head(bert_backbone, temperature=t)))) for t in (1.0, 2.0)
    )
    identity = one.load_backbone().identity
    assert one.label_fingerprint(identity) == other.label_fingerprint(identity)
    assert one.fingerprint(identity) != other.fingerprint(identity)


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"id_or_path": "./nowhere"}, CheckpointError, "nowhere"),
        ({"id_or_path": "no-such-head"}, CheckpointError, "minilm-intents"),
        ({"backbone": "package:not_installed"}, BackboneError, "not_installed"),
        ({"backbone": "owner/name"}, BackboneError, "revision"),
    ],
)
def test_what_is_not_there(values: dict[str, Any], error: type[Exception], words: str) -> None:
    """A head or an encoder that can't be found is an error that names it, before anything is served."""
    with pytest.raises(error, match=words):
        ServedModel.load(settings_of(**values))


def test_a_damaged_head(bert_head: Path, tmp_path: Path) -> None:
    """A config.json with an unknown key, or weights cut short, is an error that names the file."""
    for file in bert_head.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"temperature"', '"temprature"'))
    with pytest.raises(ConfigError, match=r"config\.json.*temprature"):
        ServedModel.load(settings_of(id_or_path=str(tmp_path)))
    (tmp_path / "config.json").write_text(config)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        ServedModel.load(settings_of(id_or_path=str(tmp_path)))


def test_a_linear_head_is_refused(tmp_path: Path) -> None:
    """With what answers it instead: its labels are its own, and the scorer has none of its tokens to compare."""
    values = {"backbone": {"reference": "a/b"}, "backbone_width": 8, "labels": ["x", "y"]}
    config = LinearConfig.parse(values | {"mode": "single_label", "pooling": "last"})
    config.save(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"holds a linear head.*`tokenalign --model .*is not served over HTTP"):
        ServedModel.load(settings_of(id_or_path=str(tmp_path)))
