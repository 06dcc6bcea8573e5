"""config.json: strict, bounded, and read back as it was written."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokenalign.config import ModelConfig, fingerprint_of
from tokenalign.errors import ConfigError

MINIMAL: dict[str, Any] = {"backbone": {"reference": "package:some_model"}, "backbone_width": 384}


def test_defaults_are_the_cards() -> None:
    """What the model card states needs no saying: width 256, 2 blocks, 4 heads, FFN 1,024, 128 tokens."""
    config = ModelConfig.parse(MINIMAL)
    assert (config.width, config.blocks, config.heads, config.ffn_width) == (256, 2, 4, 1024)
    assert (config.max_length, config.temperature) == (128, 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"widht": 3}, ["widht", "unknown key"]),
        ({"backbone": {"reference": "x", "rev": "y"}}, ["backbone.rev", "unknown key"]),
        ({"backbone": {"reference": ""}}, ["backbone.reference"]),
        ({"backbone": {"reference": "x", "revision": "main"}}, ["backbone.revision"]),
        ({"backbone": {"reference": "x", "sha256": "abc"}}, ["backbone.sha256"]),
        ({"backbone_width": 0}, ["backbone_width"]),
        ({"heads": 3}, ["heads: width 256", "3 heads"]),
        ({"temperature": 0}, ["temperature"]),
        ({"temperature": float("nan")}, ["temperature"]),
        ({"temperature": float("inf")}, ["temperature"]),
        ({"max_length": 3}, ["max_length"]),
        ({"document_template": "no field"}, ["document_template", "{text}"]),
        ({"document_template": "{text} {text}"}, ["document_template"]),
        ({"label_template": "{text}"}, ["label_template", "{label}"]),
        ({"schema_version": 2}, ["schema_version"]),
        ({"widht": 3, "temperature": -1}, ["widht", "temperature"]),
    ],
)
def test_a_bad_key_or_value_is_named(change: dict[str, Any], words: list[str]) -> None:
    """The error names the source and every key at fault."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.parse(MINIMAL | change, "head/config.json")
    for word in ["head/config.json", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("values", [None, [], "text", 3])
def test_what_is_no_object_is_refused(values: Any) -> None:
    """JSON that is not an object is a ConfigError too."""
    with pytest.raises(ConfigError):
        ModelConfig.parse(values)


def test_missing_keys_are_named() -> None:
    """Nothing that has no default is guessed."""
    with pytest.raises(ConfigError, match=r"backbone: .*backbone_width: "):
        ModelConfig.parse({})


def test_save_and_load_give_the_same(tmp_path: Path) -> None:
    """A configuration survives its file, with words of any script."""
    config = ModelConfig.parse(
        MINIMAL | {"label_template": "주제: {label}.", "temperature": 0.94, "provenance": {"data": ["a", 1]}}
    )
    config.save(tmp_path / "config.json")
    assert ModelConfig.load(tmp_path / "config.json") == config


def test_a_missing_file_says_what_a_folder_should_hold(tmp_path: Path) -> None:
    """The remedy is in the message."""
    with pytest.raises(ConfigError, match=r"does not exist; .*config\.json and model\.safetensors"):
        ModelConfig.load(tmp_path / "config.json")


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b""])
def test_a_file_that_is_no_json_is_named(tmp_path: Path, content: bytes) -> None:
    """The file's path is in the message."""
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json can't be read"):
        ModelConfig.load(path)


def test_it_can_not_be_changed() -> None:
    """Fingerprints name a configuration, so it stays as it is."""
    config = ModelConfig.parse(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        setattr(config, "temperature", 2.0)  # noqa: B010


def test_another_backbone_keeps_the_expected_hash() -> None:
    """Taking the encoder from elsewhere doesn't switch its check off; the old revision is gone."""
    config = ModelConfig.parse(
        MINIMAL | {"backbone": {"reference": "a/b", "revision": "0" * 40, "sha256": "1" * 64}}
    ).with_backbone("/elsewhere")
    assert config.backbone.model_dump() == {"reference": "/elsewhere", "revision": None, "sha256": "1" * 64}


def test_an_empty_backbone_is_a_config_error() -> None:
    """A reference that comes from a caller is validated like one in a file."""
    with pytest.raises(ConfigError, match="reference"):
        ModelConfig.parse(MINIMAL).with_backbone("")


def test_fingerprints_follow_names_and_values_not_order() -> None:
    """The same parts in another order are the same; a changed name or value is not."""
    assert fingerprint_of({"a": 1, "b": "x"}) == fingerprint_of({"b": "x", "a": 1})
    assert len({fingerprint_of(parts) for parts in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"}, {})}) == 5


def test_the_saved_file_is_plain_json(tmp_path: Path) -> None:
    """Other programs read it."""
    ModelConfig.parse(MINIMAL).save(tmp_path / "c.json")
    assert json.loads((tmp_path / "c.json").read_text())["backbone_width"] == 384
