"""Heads on disk: safetensors in and out, where a head is looked for, and the fingerprints of a model."""

import os
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tokenalign.backbone import BackboneIdentity
from tokenalign.config import (
    CONFIG_FILE,
    SCHEMA_VERSION,
    TEXT_RULES_VERSION,
    UNICODE_VERSION,
    ModelConfig,
    fingerprint_of,
)
from tokenalign.errors import CheckpointError
from tokenalign.foreign import ForeignOverrides
from tokenalign.head import AlignmentHead
from tokenalign.references import WEIGHTS_FILE, check_sha256, download

SHIPPED_MODELS = Path(__file__).parent / "models"
DEFAULT_MODEL = "minilm-intents"


def locate_head(
    id_or_path: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Path:
    """The folder with a head's config.json and model.safetensors.

    None is the shipped default; else the name of a shipped head, a folder, or a hub id, of which only these two files
    are fetched. Raises `CheckpointError` when it is none of them.
    """
    name = os.fspath(id_or_path) if id_or_path is not None else DEFAULT_MODEL
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if "/" not in name and (SHIPPED_MODELS / name).is_dir():
        return SHIPPED_MODELS / name
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        shipped = ", ".join(sorted(path.name for path in SHIPPED_MODELS.iterdir() if path.is_dir()))
        raise CheckpointError(
            f"model {name!r} is no folder here, no hub id (owner/name) and no shipped head ({shipped}); correct it"
        )
    return download(name, revision, (CONFIG_FILE, WEIGHTS_FILE), cache_dir, local_files_only)


def save_head(folder: Path, config: ModelConfig, head: AlignmentHead) -> None:
    """Write config.json and model.safetensors that `load_head` reads back equal."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    save_file(state, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config.save(folder / CONFIG_FILE)


def load_head(
    folder: Path, *, sha256: str | None = None, overrides: ForeignOverrides | None = None
) -> tuple[ModelConfig, AlignmentHead, str]:
    """(configuration, head in fp32 on the CPU, hex sha256 of its weights) of the head in `folder`.

    Raises `ConfigError` or `CheckpointError` saying which key or tensor doesn't fit.
    """
    config = ModelConfig.load(folder / CONFIG_FILE)
    path = folder / WEIGHTS_FILE
    digest = check_sha256(path, sha256)
    try:
        state = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}; fetch it again") from error
    head = AlignmentHead(config)
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    got = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if problems := _differences(expected, got):
        raise CheckpointError(f"{path} doesn't fit its {CONFIG_FILE}: {'; '.join(problems)}")
    head.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return config, head.eval(), digest


def _differences(expected: dict[str, tuple[int, ...]], got: dict[str, tuple[int, ...]]) -> list[str]:
    problems = [f"{name} is missing" for name in sorted(expected.keys() - got.keys())]
    problems += [f"{name} is unknown" for name in sorted(got.keys() - expected.keys())]
    problems += [
        f"{name} has shape {got[name]}, {expected[name]} is needed"
        for name in sorted(expected.keys() & got.keys())
        if got[name] != expected[name]
    ]
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
    """The hex sha256 over all that a score depends on: the label fingerprint, temperature and document template."""
    return fingerprint_of(
        {
            "labels": label_fingerprint,
            "temperature": config.temperature,
            "document_template": config.document_template,
        }
    )
