"""Where a backbone's files come from, and that they are the right ones."""

import sys
from hashlib import sha256
from pathlib import Path

import pytest

from tokenalign.config import BackboneReference
from tokenalign.errors import BackboneError, CheckpointError
from tokenalign.references import check_sha256, resolve_backbone, sha256_of, weights_digest_file


def reference(text: str, revision: str | None = None) -> BackboneReference:
    return BackboneReference(reference=text, revision=revision)


@pytest.mark.parametrize("where", ["", "model"])
def test_a_package_that_ships_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """`package:NAME` finds the model in the package or in its folder `model`, without importing it."""
    package = tmp_path / "some_model_wheel"
    (package / where).mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / where / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_backbone(reference("package:some_model_wheel")) == package / where
    assert "some_model_wheel" not in sys.modules


def test_a_package_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that ships no config.json is refused by name."""
    (tmp_path / "no_model_here").mkdir()
    (tmp_path / "no_model_here" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackboneError, match="no_model_here' ships no model"):
        resolve_backbone(reference("package:no_model_here"))


@pytest.mark.parametrize("name", ["not_installed_at_all", "a.b", "a-b", ""])
def test_a_package_that_is_not_installed(name: str) -> None:
    """The error names the package and how to get it."""
    with pytest.raises(BackboneError, match="not installed"):
        resolve_backbone(reference(f"package:{name}"))


def test_a_folder_beside_the_head_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder is looked for below the head's own folder, then below the current one."""
    head, here = tmp_path / "head", tmp_path / "here"
    (here / "encoder").mkdir(parents=True)
    monkeypatch.chdir(here)
    assert resolve_backbone(reference("encoder"), base=head) == Path("encoder")
    (head / "encoder").mkdir(parents=True)
    assert resolve_backbone(reference("encoder"), base=head) == head / "encoder"
    assert resolve_backbone(reference(str(here / "encoder")), base=head) == here / "encoder"


@pytest.mark.parametrize("name", ["./missing", "/no/such/folder", "~/no-such-folder", "plain", "a/b/c"])
def test_what_is_no_reference_at_all(name: str) -> None:
    """A path that doesn't exist is not mistaken for a hub id."""
    with pytest.raises(BackboneError, match="no folder here, no hub id"):
        resolve_backbone(reference(name))


def test_a_hub_id_needs_its_revision() -> None:
    """A moving model would silently change scores."""
    with pytest.raises(BackboneError, match="has no revision; pin"):
        resolve_backbone(reference("owner/name"))


def test_a_hub_id_that_is_not_in_the_cache(tmp_path: Path) -> None:
    """With downloads off nothing is tried on the network, and the error says so."""
    with pytest.raises(BackboneError, match="local_files_only"):
        resolve_backbone(reference("owner/name", "0" * 40), cache_dir=tmp_path, local_files_only=True)


def test_a_hub_id_in_the_cache(tmp_path: Path) -> None:
    """A pinned snapshot in the given cache is found with downloads off."""
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    found = resolve_backbone(reference("owner/name", "0" * 40), cache_dir=tmp_path, local_files_only=True)
    assert found.samefile(snapshot)


def test_hash_of_a_file(tmp_path: Path) -> None:
    """The hex sha256 of the bytes; it is given back when it is the expected one."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    digest = sha256(b"weights").hexdigest()
    assert sha256_of(path) == check_sha256(path, None) == check_sha256(path, digest) == digest


def test_a_wrong_hash_names_file_and_both_hashes(tmp_path: Path) -> None:
    """An altered file is refused."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"altered")
    with pytest.raises(CheckpointError) as caught:
        check_sha256(path, "1" * 64)
    for word in (str(path), "1" * 64, sha256_of(path), "fetch it again"):
        assert word in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that isn't there is said to be missing."""
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        check_sha256(tmp_path / "model.safetensors", None)


def test_the_file_that_names_the_weights(tmp_path: Path) -> None:
    """The single file, else the index of a sharded model; pickled weights are none."""
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="only safetensors"):
        weights_digest_file(tmp_path)
    (tmp_path / "model.safetensors.index.json").touch()
    assert weights_digest_file(tmp_path).name == "model.safetensors.index.json"
    (tmp_path / "model.safetensors").touch()
    assert weights_digest_file(tmp_path).name == "model.safetensors"
