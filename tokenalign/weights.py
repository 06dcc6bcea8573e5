"""Heads on disk: safetensors in and out, where a head is looked for, and the fingerprints of a model."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenalign.backbone import BackboneIdentity
from tokenalign.config import (
    CONFIG_FILE,
    SCHEMA_VERSION,
    TEXT_RULES_VERSION,
    UNICODE_VERSION,
    ModelConfig,
    fingerprint_of,
    read_json,
)
from tokenalign.errors import BackboneError, CheckpointError, ConfigError
from tokenalign.foreign import ForeignOverrides, adopt
from tokenalign.head import AlignmentHead
from tokenalign.references import WEIGHTS_FILE, check_sha256, download

SHIPPED_MODELS = Path(__file__).parent / "models"
DEFAULT_MODEL = "minilm-intents"
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


def locate_head(
    id_or_path: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Path:
    """The folder with a head's config.json and model.safetensors.

    None is the shipped default; else a folder, the name of a shipped head, or a hub id, of which only these two files
    are fetched. Raises `CheckpointError` when it is none of them or can't be fetched.
    """
    if id_or_path is None:
        return SHIPPED_MODELS / DEFAULT_MODEL
    name = os.fspath(id_or_path)
    folder = Path(name).expanduser()
    if name and folder.is_dir():  # Path("") is the working folder
        return folder
    if name and "/" not in name and (SHIPPED_MODELS / name).is_dir():
        return SHIPPED_MODELS / name
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        shipped = ", ".join(sorted(path.name for path in SHIPPED_MODELS.iterdir() if path.is_dir()))
        raise CheckpointError(
            f"model {name!r} is no folder here, no hub id (owner/name) and no shipped head ({shipped}); correct it"
        )
    try:
        return download(name, revision, (CONFIG_FILE, WEIGHTS_FILE), cache_dir, local_files_only)
    except BackboneError as error:
        raise CheckpointError(f"head {error}") from error


def save_head(folder: Path, config: ModelConfig, head: AlignmentHead) -> None:
    """Write config.json and model.safetensors that `load_head` reads back equal.

    Raises `CheckpointError`, and writes nothing, for a head that `load_head` would refuse.
    """
    if problems := _differences(config, head.state_dict()):
        raise CheckpointError(f"this head can't be saved with this configuration: {'; '.join(problems)}")
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    save_file(state, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config.save(folder / CONFIG_FILE)


def load_head(
    folder: Path, *, sha256: str | None = None, overrides: ForeignOverrides | None = None
) -> tuple[ModelConfig, AlignmentHead, str]:
    """(configuration, head in fp32 on the CPU, hex digest of its weights) of the head in `folder`.

    A config.json without `schema_version` was written by another program and is read by `tokenalign.foreign`; so is any
    that `overrides` are given for. The digest is the sha256 of the weights file; for a foreign head it covers as well
    which tensor was taken for which, since other overrides make another head of the same file.
    Raises `ConfigError` or `CheckpointError` saying which key or tensor doesn't fit.
    """
    values = _read_config(folder / CONFIG_FILE)
    path = folder / WEIGHTS_FILE
    if "schema_version" in values and (kind := values.get("kind")) is not None:
        raise ConfigError(
            f"{folder} holds a {kind} head, which has labels of its own and takes no others; a linear head answers in "
            f"`tokenalign --model {folder}` and in tokenalign.linear.LinearClassifier, and is not served over HTTP"
        )
    if overrides is None and "schema_version" in values:
        config = _own_config(values, folder / CONFIG_FILE)
        digest, state = _read_weights(path, sha256)
    else:
        digest, tensors = _read_weights(path, sha256)
        foreign = adopt(values, tensors, overrides or ForeignOverrides(), folder)
        config, state = foreign.config, foreign.tensors
        digest = fingerprint_of({"weights": digest, "tensors": foreign.sources})
    if problems := _differences(config, state):
        raise CheckpointError(f"{path} doesn't fit its {CONFIG_FILE}: {'; '.join(problems)}")
    head = AlignmentHead(config)
    head.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return config, head.eval(), digest


def _read_config(path: Path) -> dict[str, Any]:
    values = read_json(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a JSON {type(values).__name__}, an object with the head's keys is needed")
    return values


def _own_config(values: dict[str, Any], path: Path) -> ModelConfig:
    version = values["schema_version"]
    elsewhere = "if another program wrote this head, give overrides=ForeignOverrides(), which reads it as such"
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: schema_version is {version!r}, but this release reads only {SCHEMA_VERSION}; "
            f"use the release of tokenalign that wrote it; {elsewhere}"
        )
    try:
        return ModelConfig.parse(values, str(path))
    except ConfigError as error:
        if values.keys() <= ModelConfig.model_fields.keys():
            raise
        raise ConfigError(f"{error}; {elsewhere}") from error


def _read_weights(path: Path, sha256: str | None) -> tuple[str, dict[str, Tensor]]:
    if not path.is_file():
        _refuse_pickles(path.parent)
    digest = check_sha256(path, sha256)
    try:
        return digest, load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}; fetch it again") from error


def _refuse_pickles(folder: Path) -> None:
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"{folder} has no {WEIGHTS_FILE}, only {', '.join(pickles)}: a pickle runs its author's code when it is "
            f"read, so only safetensors are; have its author publish them, or convert it where you trust it"
        )


def _differences(config: ModelConfig, got: Mapping[str, Tensor]) -> list[str]:
    with torch.device("meta"):  # shapes alone: a configuration of absurd widths allocates nothing
        expected = AlignmentHead(config).state_dict()
    problems = [f"{name} is missing" for name in sorted(expected.keys() - got.keys())]
    problems += [f"{name} is unknown" for name in sorted(got.keys() - expected.keys())]
    for name in sorted(expected.keys() & got.keys()):
        needed, shape = tuple(expected[name].shape), tuple(got[name].shape)
        if shape != needed:
            problems.append(f"{name} has shape {shape}, {needed} is needed")
        elif not got[name].is_floating_point():
            problems.append(f"{name} is of {got[name].dtype}, a float dtype is needed")
        elif not got[name].float().isfinite().all():
            problems.append(f"{name} holds NaN or infinity")
    return problems if len(problems) <= 8 else [*problems[:8], f"and {len(problems) - 8} more"]


def label_fingerprint(config: ModelConfig, backbone: BackboneIdentity, tokenizer_digest: str, head_digest: str) -> str:
    """The hex sha256 over everything that a label's cached rows depend on."""
    return fingerprint_of(
        {
            "schema": SCHEMA_VERSION,
            "text_rules": TEXT_RULES_VERSION,
            "unicode": UNICODE_VERSION,
            "backbone": asdict(backbone),
            "tokenizer": tokenizer_digest,
            "head": head_digest,
            "head_shape": [config.backbone_width, config.width, config.blocks, config.heads, config.ffn_width],
            "label_template": config.label_template,
            "max_length": config.max_length,
        }
    )


def model_fingerprint(label_fingerprint: str, config: ModelConfig) -> str:
    """The hex sha256 over all that a score depends on: label fingerprint, calibration and document template."""
    parts: dict[str, Any] = {
        "labels": label_fingerprint,
        "temperature": config.temperature,
        "document_template": config.document_template,
    }
    if config.multi_label is not None:  # a head without one keeps the fingerprint that it always had
        parts["multi_label"] = config.multi_label.model_dump()
    if config.abstention is not None:
        parts["abstention"] = config.abstention.model_dump()
    return fingerprint_of(parts)
