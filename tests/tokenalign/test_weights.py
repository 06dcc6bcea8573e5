"""Heads on disk: written and read back equal, refused when altered, found where they are said to be."""

import json
import pickle
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenalign import weights
from tokenalign.backbone import BackboneIdentity
from tokenalign.config import ModelConfig
from tokenalign.errors import CheckpointError, ConfigError
from tokenalign.foreign import ForeignOverrides
from tokenalign.head import AlignmentHead
from tokenalign.weights import label_fingerprint, load_head, locate_head, model_fingerprint, save_head

CONFIG = ModelConfig.parse(
    {
        "backbone": {"reference": "package:some_model"},
        "backbone_width": 24,
        "width": 16,
        "heads": 2,
        "ffn_width": 40,
        "label_template": "It is {label} – né.",
        "temperature": 0.7,
        "provenance": {"seed": 42},
    }
)


def make_head() -> AlignmentHead:
    torch.manual_seed(3)
    return AlignmentHead(CONFIG)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A head as we write it."""
    save_head(tmp_path, CONFIG, make_head())
    return tmp_path


def rewrite_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")


def rewrite_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(dict(load_file(path))), path)


def test_a_head_is_read_back_as_it_was_written(folder: Path) -> None:
    """Configuration and weights are equal, ready for inference, and the digest is the file's sha256."""
    config, head, digest = load_head(folder)
    assert config == CONFIG
    assert not head.training
    for name, tensor in make_head().state_dict().items():
        assert torch.equal(head.state_dict()[name], tensor)
    assert digest == sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert load_head(folder, sha256=digest)[2] == digest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_load_as_fp32(folder: Path, dtype: torch.dtype) -> None:
    """Head maths runs in fp32 whatever the file holds."""
    rewrite_weights(folder, lambda state: {name: tensor.to(dtype) for name, tensor in state.items()})
    assert {parameter.dtype for parameter in load_head(folder)[1].parameters()} == {torch.float32}


def test_unknown_keys_of_an_own_configuration_are_an_error(folder: Path) -> None:
    """A misspelt key is never ignored; how to read a foreign head that has a schema_version is said."""
    rewrite_config(folder, lambda values: values | {"temprature": 0.5})
    with pytest.raises(ConfigError, match=r"temprature: unknown key.*overrides=ForeignOverrides\(\)"):
        load_head(folder)
    assert load_head(folder, overrides=ForeignOverrides())[0].provenance["foreign_config"]["unused"] == {
        "schema_version": 1,
        "multi_label": None,  # no part of another program's head, as the next
        "abstention": None,
        "temprature": 0.5,
    }


def test_a_bad_value_of_an_own_configuration_is_named(folder: Path) -> None:
    """A known key with a value out of its bounds says nothing of foreign heads."""
    rewrite_config(folder, lambda values: values | {"temperature": -1})
    with pytest.raises(ConfigError, match="temperature") as caught:
        load_head(folder)
    assert "another program" not in str(caught.value)


@pytest.mark.parametrize("version", [0, 2, "1", None, [1]])
def test_another_schema_version_says_which_is_read(folder: Path, version: Any) -> None:
    """Neither newer nor nonsensical versions are read as if they were ours."""
    rewrite_config(folder, lambda values: values | {"schema_version": version})
    with pytest.raises(ConfigError, match="but this release reads only 1") as caught:
        load_head(folder)
    assert f"schema_version is {version!r}" in str(caught.value)


def test_without_schema_version_a_head_is_foreign(folder: Path) -> None:
    """Our own keys are understood there too, and the numbers stay the same."""
    rewrite_config(folder, lambda values: {key: v for key, v in values.items() if key != "schema_version"})
    config, head, _ = load_head(folder)
    assert config.model_dump(exclude={"provenance"}) == CONFIG.model_dump(exclude={"provenance"})
    assert torch.equal(head.query.weight, make_head().query.weight)


@pytest.mark.parametrize("content", ["[]", "3", '"text"', "null"])
def test_a_configuration_that_is_no_object_is_refused(folder: Path, content: str) -> None:
    """The error says what was found and what is needed."""
    (folder / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="an object with the head's keys is needed"):
        load_head(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{}"])
def test_a_configuration_that_is_no_json_is_refused(folder: Path, content: bytes) -> None:
    """A cut or foreign-coded file is named."""
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json can't be read as JSON"):
        load_head(folder)


def test_a_missing_configuration_is_named(folder: Path) -> None:
    """The error says which two files a head is made of."""
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json does not exist; a model folder holds"):
        load_head(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -1000])
def test_a_truncated_weights_file_is_refused(folder: Path, keep: int) -> None:
    """A download that broke off anywhere is told as such."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="is no whole safetensors file"):
        load_head(folder)


@pytest.mark.parametrize("content", [b"\xff" * 64, pickle.dumps({"a": 1}), b"PK\x03\x04" + bytes(100)])
def test_another_file_under_that_name_is_refused(folder: Path, content: bytes) -> None:
    """Garbage, a pickle and a zip are no safetensors, and nothing of them is run."""
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is no whole safetensors file"):
        load_head(folder)


def test_a_flipped_bit_is_caught_by_the_hash(folder: Path) -> None:
    """The numbers would load, so only the expected hash can tell."""
    path = folder / "model.safetensors"
    expected = load_head(folder)[2]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert load_head(folder)[2] != expected
    with pytest.raises(CheckpointError, match=f"{expected} was expected"):
        load_head(folder, sha256=expected)


def test_a_missing_weights_file_is_named(folder: Path) -> None:
    """The error says which file, not only that something is missing."""
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load_head(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "head.pt", "best.pth", "last.ckpt"])
@pytest.mark.parametrize("own", [True, False])
def test_pickles_are_refused_with_the_reason(folder: Path, name: str, own: bool) -> None:
    """A checkpoint that could run code is not read, and the error says why."""
    (folder / "model.safetensors").rename(folder / name)
    if not own:
        rewrite_config(folder, lambda values: {"heads": values["heads"]})
    with pytest.raises(CheckpointError, match=rf"only {name}: a pickle runs its author's code"):
        load_head(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: {n: t for n, t in s.items() if n != "query.weight"}, r"query\.weight is missing"),
        (lambda s: s | {"scorer.weight": torch.ones(1)}, r"scorer\.weight is unknown"),
        (lambda s: s | {"query.weight": torch.ones(16, 8)}, r"query\.weight has shape \(16, 8\), \(16, 16\) is needed"),
        (lambda s: s | {"key.weight": torch.ones(16, 16, dtype=torch.int8)}, r"key\.weight is of torch\.int8"),
        (lambda s: s | {"input.bias": torch.full((24,), torch.nan)}, r"input\.bias holds NaN or infinity"),
        (lambda s: s | {"log_scale": torch.tensor(torch.inf)}, r"log_scale holds NaN or infinity"),
        (lambda s: {"x": torch.ones(1)}, r"and \d+ more"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder: Path, change: Any, words: str) -> None:
    """Each tensor at fault is named with what is needed, before any of them is used."""
    rewrite_weights(folder, change)
    with pytest.raises(CheckpointError, match=words):
        load_head(folder)


def test_absurd_widths_are_refused_without_allocating_them(folder: Path) -> None:
    """A configuration of 64 blocks of 8,192 (140 GB) is compared by shape alone."""
    rewrite_config(folder, lambda values: values | {"width": 8192, "ffn_width": 65536, "blocks": 64})
    with pytest.raises(CheckpointError, match="doesn't fit its config"):
        load_head(folder)


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    """A diverged head, or one of other widths than its configuration, leaves no file behind."""
    head = make_head()
    with pytest.raises(CheckpointError, match="can't be saved with this configuration"):
        save_head(tmp_path / "other", CONFIG.model_copy(update={"blocks": 3}), head)
    with torch.no_grad():
        head.log_scale.fill_(torch.nan)
    with pytest.raises(CheckpointError, match="log_scale holds NaN"):
        save_head(tmp_path / "nan", CONFIG, head)
    assert list(tmp_path.iterdir()) == []


# Where heads are looked for


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package's models folder with the default and one more; the working folder is another one."""
    models = tmp_path / "package"
    for name in (weights.DEFAULT_MODEL, "other-head"):
        (models / name).mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(weights, "SHIPPED_MODELS", models)
    return models


def test_the_default_and_shipped_heads_are_found_by_name(shipped: Path) -> None:
    """No name is the default, wherever one works."""
    Path(weights.DEFAULT_MODEL).mkdir()
    assert locate_head() == shipped / weights.DEFAULT_MODEL
    assert locate_head("other-head") == shipped / "other-head"


def test_a_folder_goes_before_a_shipped_name(shipped: Path) -> None:
    """What is named and lies here is meant."""
    Path("other-head").mkdir()
    assert locate_head("other-head") == Path("other-head")
    assert locate_head(Path()) == Path()


@pytest.mark.parametrize("name", ["", "no-such-head", "./missing", "/missing/folder", "a/b/c", "~/missing-head"])
def test_what_is_nowhere_is_refused_with_what_there_is(shipped: Path, name: str) -> None:
    """The error lists the shipped heads; an empty name is not the working folder."""
    with pytest.raises(CheckpointError, match=rf"{weights.DEFAULT_MODEL}, other-head"):
        locate_head(name)


def test_a_hub_id_that_is_not_cached_stays_offline(shipped: Path, tmp_path: Path) -> None:
    """With downloads off the error says so, and what to do."""
    with pytest.raises(CheckpointError, match=r"head 'owner/name' .*downloads are off"):
        locate_head("owner/name", cache_dir=tmp_path / "cache", local_files_only=True)


# Fingerprints

IDENTITY = {
    "reference": "a/b",
    "revision": "0" * 40,
    "weights_sha256": "1" * 64,
    "config_sha256": "2",
    "dtype": "float32",
}


def identity(**changes: str) -> BackboneIdentity:
    return BackboneIdentity(**(IDENTITY | changes))


@pytest.mark.parametrize("change", [{"label_template": "x {label}"}, {"max_length": 64}, {"heads": 4}])
def test_what_changes_label_rows_changes_the_label_fingerprint(change: dict[str, Any]) -> None:
    """Rows that were cached under another template, length or head count are never found again."""
    changed = CONFIG.model_copy(update=change)
    assert label_fingerprint(changed, identity(), "t", "h") != label_fingerprint(CONFIG, identity(), "t", "h")


def test_encoder_tokenizer_and_weights_are_in_the_label_fingerprint() -> None:
    """Each of them alone makes other rows."""
    prints = {label_fingerprint(CONFIG, identity(**{key: "other"}), "t", "h") for key in IDENTITY}
    prints |= {label_fingerprint(CONFIG, identity(), *rest) for rest in (("t", "h"), ("other", "h"), ("t", "other"))}
    assert len(prints) == len(IDENTITY) + 3


def test_scores_have_a_fingerprint_of_their_own() -> None:
    """Temperature and document template change scores and leave label rows as they are."""
    for change in ({"temperature": 1.5}, {"document_template": "x {text}"}):
        changed = CONFIG.model_copy(update=change)
        assert label_fingerprint(changed, identity(), "t", "h") == label_fingerprint(CONFIG, identity(), "t", "h")
        assert model_fingerprint("labels", changed) != model_fingerprint("labels", CONFIG)
