"""The frozen Hugging Face encoder: token ids in, last-layer token states out."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from tokenalign.config import BackboneReference, ModelConfig
from tokenalign.errors import BackboneError, InputError
from tokenalign.references import check_sha256, resolve_backbone, weights_digest_file
from tokenalign.tokens import TokenBatch, length_groups, ragged_positions

DType = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_MAX_BATCH_TOKENS = 8_192

# A text alone and in a padded batch must give the same vectors. Kernels differ by shape, so equality is up to rounding:
# the largest deviation allowed, relative to the largest value.
_SELF_CHECK_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def resolve_device(device: str) -> torch.device:
    """The torch device for "auto" (cuda, else mps, else cpu) or a name; `BackboneError` when it is not there."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise BackboneError(f"device {device!r} is unknown; use auto, cpu, cuda, cuda:N or mps") from error
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(resolved.type, False):
        raise BackboneError(f"device {device!r} is not available on this machine; use auto or cpu")
    return resolved


def resolve_dtype(dtype: DType, device: torch.device) -> torch.dtype:
    """The compute dtype: "auto" is bfloat16 on cuda, float16 on mps, and float32 on cpu."""
    if dtype == "auto":
        return {"cuda": torch.bfloat16, "mps": torch.float16}.get(device.type, torch.float32)
    if dtype not in DTYPES:
        raise BackboneError(f"dtype {dtype!r} is unknown; use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class BackboneIdentity:
    """What names an encoder's numbers: its reference, weights and architecture, and the dtype that it computes in."""

    reference: str
    revision: str | None
    weights_sha256: str
    config_sha256: str
    dtype: str


class Backbone:
    """A frozen encoder. `encode` is deterministic for a given batch and never computes gradients."""

    def __init__(self, model: Any, identity: BackboneIdentity, device: torch.device) -> None:
        self._model = model.eval().requires_grad_(False).to(device)
        self.identity = identity
        self.device = device
        self.width = int(model.config.hidden_size)

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        *,
        base: Path | None = None,
        device: str = "auto",
        dtype: DType = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
    ) -> "Backbone":
        """The encoder that `config.backbone` names, checked: hash, width, and the same vectors alone and in a batch.

        Raises `BackboneError` or `CheckpointError` saying which file, value or step is at fault.
        """
        where = resolve_device(device)
        kind = resolve_dtype(dtype, where)
        folder = resolve_backbone(config.backbone, base=base, cache_dir=cache_dir, local_files_only=local_files_only)
        identity = identify(folder, config.backbone, kind)
        backbone = cls(_load_text_model(folder, kind), identity, where)
        if backbone.width != config.backbone_width:
            raise BackboneError(
                f"backbone {config.backbone.reference!r} has width {backbone.width}, the head was made for "
                f"backbone_width {config.backbone_width}; use the backbone that the head names"
            )
        backbone.self_check()
        return backbone

    @torch.inference_mode()
    def encode(self, batch: TokenBatch, *, max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS) -> Tensor:
        """`[tokens, D]` last-layer states of every token, in the order of the batch, on the backbone's device.

        batch: ids. Sequences are run in right-padded groups of similar length, of at most `max_batch_tokens` padded
        tokens. Raises `InputError` for ids outside of the vocabulary.
        """
        self._check_ids(batch.values)
        ids = torch.from_numpy(batch.values.astype(np.int64)).to(self.device)
        out = torch.empty(len(ids), self.width, dtype=self._model.dtype, device=self.device)
        offsets = batch.offsets
        for group in length_groups(batch.lengths, max_batch_tokens):
            lengths = torch.from_numpy(batch.lengths[group]).to(self.device)
            mask = torch.arange(int(lengths.max()), device=self.device) < lengths[:, None]
            positions = torch.from_numpy(ragged_positions(offsets[group], batch.lengths[group])).to(self.device)
            padded = ids.new_zeros(mask.shape)
            padded[mask] = ids[positions]
            out[positions] = self._forward(padded, mask)[mask]
        return out

    def self_check(self) -> None:
        """Raise `BackboneError` unless a text alone and in a padded batch gives the same vectors."""
        vocabulary = int(self._model.config.vocab_size)
        rng = np.random.default_rng(0)
        lengths = np.array([5, 23, 11], dtype=np.int32)
        ids = rng.integers(0, vocabulary, int(lengths.sum()), dtype=np.int32)
        batch = TokenBatch(ids, lengths, np.ones(len(ids), dtype=np.bool_))
        offsets = batch.offsets
        together = self._padded_states(batch)
        for i in range(len(lengths)):
            alone = self._padded_states(batch.select([i]))
            difference = (together[offsets[i] : offsets[i + 1]] - alone).abs().max() / alone.abs().max()
            if not difference <= _SELF_CHECK_TOLERANCE[self._model.dtype]:
                raise BackboneError(
                    f"backbone {self.identity.reference!r} gives a text other vectors in a padded batch than alone "
                    f"(relative difference {float(difference):.2g}), so scores would depend on the neighbours; "
                    "its attention mask is not respected"
                )

    @torch.inference_mode()
    def _padded_states(self, batch: TokenBatch) -> Tensor:
        mask = torch.arange(int(batch.lengths.max())) < torch.from_numpy(batch.lengths)[:, None]
        padded = torch.zeros(mask.shape, dtype=torch.long)
        padded[mask] = torch.from_numpy(batch.values.astype(np.int64))
        mask = mask.to(self.device)
        return self._forward(padded.to(self.device), mask)[mask].float()

    def _forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states: Tensor = self._model(
            input_ids=ids, attention_mask=mask.to(torch.long), **self._forward_options()
        ).last_hidden_state
        return states

    def _forward_options(self) -> dict[str, Any]:
        # A decoder would build a key/value cache that nobody reads.
        return {"use_cache": False} if hasattr(self._model.config, "use_cache") else {}

    def _check_ids(self, ids: NDArray[Any]) -> None:
        vocabulary = int(self._model.config.vocab_size)
        if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary):
            raise InputError(
                f"has token ids {int(ids.min())} to {int(ids.max())}, the backbone's vocabulary has {vocabulary:,}; "
                "tokenizer and backbone don't belong together",
                ("ids",),
            )


def identify(folder: Path, reference: BackboneReference, dtype: torch.dtype) -> BackboneIdentity:
    """The identity of the backbone in `folder`, its weights hashed and compared with what the reference expects."""
    digest = check_sha256(weights_digest_file(folder), reference.sha256)
    return BackboneIdentity(
        reference.reference,
        reference.revision,
        digest,
        check_sha256(folder / "config.json", None),
        str(dtype).removeprefix("torch."),
    )


def _load_text_model(folder: Path, dtype: torch.dtype) -> Any:
    """The headless text model in `folder`, from safetensors alone, never with remote code."""
    from transformers import AutoConfig, AutoModel

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        if config.is_encoder_decoder:
            raise BackboneError(f"{folder} is an encoder-decoder model; use an encoder or a decoder alone")
        if not hasattr(config, "hidden_size"):
            raise BackboneError(f"{folder} is a composite model ({config.model_type}); use its text model alone")
        model, report = AutoModel.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise BackboneError(f"the backbone in {folder} can't be loaded: {error}") from error
    # BERT-like models carry a pooler on [CLS], which token states never pass through.
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise BackboneError(
            f"the weights in {folder} lack {len(missing)} tensors that its config.json asks for: "
            f"{', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}; they would be random, so it is refused"
        )
    return model
