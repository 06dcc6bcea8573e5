"""Folders of headless text models: found, read with their weights as they are, and written."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from tokenalign.compression.counting import meta_model
from tokenalign.config import BackboneReference
from tokenalign.errors import BackboneError, CompressionError
from tokenalign.references import PACKAGE_PREFIX, download, local_backbone, resolve_backbone

CONFIG_FILE = "config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model"),
)
ONE_FILE = "1000GB"  # shards would need an index, and a hash for each

# Where a model that reads images too keeps its text model.
_TEXT_PART = {r"^model\.language_model\.": "", r"^language_model\.model\.": "", r"^language_model\.": ""}


@dataclass(frozen=True, slots=True)
class Source:
    """A model's folder, and what the caller named it by."""

    folder: Path
    reference: str
    revision: str | None = None

    @property
    def named(self) -> dict[str, str | None]:
        """What a manifest says of it beside its files' hashes."""
        return {"reference": self.reference, "revision": self.revision}


@dataclass(frozen=True, slots=True, eq=False)
class TextModel:
    """A headless model with its weights; absent: names of parameters that it has and its file hasn't, as BERT's pooler.

    Those hold random numbers, which token states never pass through; they are not written.
    """

    model: Any
    absent: frozenset[str] = frozenset()


def find_folder(
    reference: str,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    weights: bool = True,
) -> Path:
    """The folder of a folder's path, `package:NAME` or hub id with its revision; weights: whether they are needed.

    Raises `BackboneError` where it can't be had.
    """
    elsewhere = local_backbone(reference) is None and not reference.startswith((PACKAGE_PREFIX, ".", "/", "~"))
    if elsewhere and revision is None:
        raise BackboneError(
            f"{reference!r} is no folder here; a hub id needs --revision with its commit (40 hex digits), since one "
            "that moves would give another one each time"
        )
    if elsewhere and not weights:
        return download(reference, revision, (CONFIG_FILE,), cache_dir, local_files_only)
    backbone = BackboneReference(reference=reference, revision=revision)
    return resolve_backbone(backbone, cache_dir=cache_dir, local_files_only=local_files_only)


def text_config(folder: Path) -> Any:
    """The transformers configuration of the text model in `folder`; of one that reads images too, its text part.

    Raises `BackboneError` for an encoder-decoder, and for what has no text model.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise BackboneError(f"{folder / CONFIG_FILE} can't be read: {error}") from error
    if config.is_encoder_decoder:
        raise BackboneError(f"{folder} is an encoder-decoder model; use an encoder or a decoder alone")
    text = config.get_text_config()
    if not hasattr(text, "hidden_size") or not hasattr(text, "num_hidden_layers"):
        raise BackboneError(f"{folder} ({config.model_type}) is no text model with hidden_size and num_hidden_layers")
    return text


def load_text_model(folder: Path, dtype: torch.dtype | None = None) -> TextModel:
    """The text model in `folder` without any head, in `dtype`, by default that of its file.

    From safetensors alone, never with remote code. Raises `BackboneError` where weights are missing or unreadable.
    """
    from transformers import AutoModel

    config = text_config(folder)
    try:
        model, report = AutoModel.from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            key_mapping=_TEXT_PART,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise BackboneError(f"the model in {folder} can't be loaded: {error}") from error
    absent = frozenset(report["missing_keys"])
    if missing := sorted(name for name in absent if not name.startswith("pooler.")):
        raise BackboneError(
            f"the weights in {folder} lack {len(missing)} tensors that its {CONFIG_FILE} asks for: "
            f"{', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}; fetch the folder again"
        )
    return TextModel(model.eval(), absent)


def model_of(config: Any, state: dict[str, Tensor]) -> Any:
    """The model of a configuration with exactly these tensors, in their dtype.

    Raises `CompressionError` unless names and shapes are those that the configuration asks for.
    """
    model = meta_model(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if wanted != given:
        name = min(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
        raise CompressionError(
            f"{config.model_type}: the smaller model would need {name} of shape {wanted.get(name)}, the kept weights "
            f"have {given.get(name)}; architectures whose layers differ by more than layer_types can't be cut"
        )
    model.load_state_dict(state, assign=True)
    kinds = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if len(kinds) == 1:
        model.config.dtype = kinds.pop()
    return model.eval()


def check_fresh(folder: Path) -> None:
    """Raise `CompressionError` unless `folder` is absent or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CompressionError(f"{folder} exists and is not empty; name a fresh --output")


def save_text_model(folder: Path, text_model: TextModel) -> None:
    """Write config.json and one model.safetensors without a head."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: t.contiguous() for name, t in text_model.model.state_dict().items() if name not in text_model.absent}
    text_model.model.save_pretrained(folder, state_dict=state, max_shard_size=ONE_FILE)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files as they are."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
