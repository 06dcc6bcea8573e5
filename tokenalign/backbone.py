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
from tokenalign.devices import is_out_of_memory, release_memory, to_device
from tokenalign.errors import BackboneError, DeviceMemoryError, InputError
from tokenalign.packing import Packing, packed_attention, packed_groups
from tokenalign.references import check_sha256, resolve_backbone, weights_digest_file
from tokenalign.tokens import IntArray, TokenBatch, length_groups, ragged_positions

DType = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_MAX_BATCH_TOKENS = 8_192

# Of one pass on a CPU, whose caches then hold what lies between the layers: 8,192 were 15 % slower on MiniLM, 512 10 %.
MAX_CPU_PASS_TOKENS = 2_048

_PACKED_ATTENTION = "tokenalign_packed"
_SPECIAL_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias")

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
    """A frozen encoder. `encode` is deterministic for a given batch and never computes gradients.

    width: of its token states; token_multiply_adds: what one token costs, attention left out
    """

    def __init__(self, model: Any, identity: BackboneIdentity, device: torch.device) -> None:
        self._model = model.eval().requires_grad_(False).to(device)
        self.identity = identity
        self.device = device
        self.width = int(model.config.hidden_size)
        embeddings = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
        self.token_multiply_adds = sum(p.numel() for p in model.parameters() if id(p) not in embeddings)
        self._packs = False

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

        Sequences run without padding where the architecture allows it, see `pack`.
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
        backbone.pack()
        return backbone

    @torch.inference_mode()
    def encode(self, batch: TokenBatch, *, max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS) -> Tensor:
        """`[tokens, D]` last-layer states of every token, in the order of the batch, on the backbone's device.

        batch: ids. Sequences of similar length run together, at most `max_batch_tokens` tokens at a time, padding
        counted; where the device has no room for that, half of them, down to one sequence. Raises `InputError` for ids
        outside of the vocabulary, `DeviceMemoryError` where one sequence is too much.
        """
        self._check_ids(batch.values)
        out = torch.empty(len(batch.values), self.width, dtype=self._model.dtype, device=self.device)
        offsets = batch.offsets
        waiting = list(reversed(self._groups(batch.lengths, max_batch_tokens)))
        while waiting:
            group = waiting.pop()
            lengths = batch.lengths[group]
            positions = ragged_positions(offsets[group], lengths)
            ids = batch.values[positions].astype(np.int64)
            try:
                out[to_device(positions, self.device)] = self._states(to_device(ids, self.device), lengths)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if len(group) == 1:
                    raise DeviceMemoryError(
                        f"{self.device} has no memory for one sequence of {lengths[0]} tokens; free some of it, "
                        "lower max_length, or load the backbone in a smaller dtype"
                    ) from error
                waiting += [group[len(group) // 2 :], group[: len(group) // 2]]
            else:
                continue
            release_memory(self.device)  # here, where the error no longer holds the tensors of the failed pass
        return out

    def self_check(self) -> None:
        """Raise `BackboneError` unless a text alone and in a batch gives the same vectors."""
        difference = self._relative_difference(self._probe(together=True), self._probe(together=False))
        if not difference <= self._tolerance:
            raise BackboneError(
                f"backbone {self.identity.reference!r} gives a text other vectors in a padded batch than alone "
                f"(relative difference {difference:.2g}), so scores would depend on the neighbours; "
                "its attention mask is not respected"
            )

    def pack(self) -> bool:
        """Whether sequences run without padding from now on: they do where that gives the same vectors as alone.

        It takes a transformer that hands its attention to transformers' interface, attends to all tokens or to all
        before, and takes positions. Others, such as models with linear or windowed attention, stay padded.
        """
        from transformers import AttentionInterface

        alone = self._probe(together=False)
        before = self._model.config._attn_implementation
        AttentionInterface.register(_PACKED_ATTENTION, _attend_packed)
        try:
            self._model.set_attn_implementation(_PACKED_ATTENTION)
            self._packs = True
            self._packs = self._relative_difference(self._probe(together=True), alone) <= self._tolerance
        except Exception:  # noqa: BLE001  an architecture may refuse in any way; padded it was just seen to work
            self._packs = False
        if not self._packs:
            self._model.set_attn_implementation(before)
        return self._packs

    @property
    def _tolerance(self) -> float:
        return _SELF_CHECK_TOLERANCE[self._model.dtype]

    @torch.inference_mode()
    def _probe(self, *, together: bool) -> list[Tensor]:
        """The states of three fixed sequences, out of one pass or of one each."""
        lengths = np.array([5, 11, 23], dtype=np.int32)
        ids = np.random.default_rng(0).integers(0, int(self._model.config.vocab_size), int(lengths.sum()))
        sequences = torch.split(torch.from_numpy(ids).to(self.device), lengths.tolist())
        if together:
            return list(torch.split(self._states(torch.cat(sequences), lengths).float(), lengths.tolist()))
        return [self._states(sequence, lengths[i : i + 1]).float() for i, sequence in enumerate(sequences)]

    @staticmethod
    def _relative_difference(states: list[Tensor], expected: list[Tensor]) -> float:
        """The largest over the sequences, relative to the sequence's largest value; NaN where there is NaN."""
        pairs = zip(states, expected, strict=True)
        return float(torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max())

    def _groups(self, lengths: IntArray, max_tokens: int) -> list[NDArray[np.intp]]:
        if self.device.type == "cpu":
            max_tokens = min(max_tokens, MAX_CPU_PASS_TOKENS)
        return packed_groups(lengths, max_tokens) if self._packs else list(length_groups(lengths, max_tokens))

    def _states(self, ids: Tensor, lengths: IntArray) -> Tensor:
        """`[tokens, D]` states of sequences that lie behind each other, out of one pass."""
        if self._packs:
            positions = to_device(ragged_positions(np.zeros_like(lengths), lengths), self.device)
            packing = Packing.of(lengths, self.device)
            states: Tensor = self._forward(input_ids=ids[None], position_ids=positions[None], packing=packing)[0]
            return states
        if (lengths == lengths[0]).all():
            return self._forward(input_ids=ids.view(len(lengths), -1)).flatten(0, 1)
        counts = to_device(lengths, self.device)
        mask = torch.arange(int(lengths.max()), device=self.device) < counts[:, None]
        padded = ids.new_zeros(mask.shape)
        padded[mask] = ids
        return self._forward(input_ids=padded, attention_mask=mask.to(torch.long))[mask]

    def _forward(self, **inputs: Any) -> Tensor:
        states: Tensor = self._model(**inputs, **self._forward_options()).last_hidden_state
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


def _attend_packed(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention within each packed sequence, in the form of transformers' interface: `[1, tokens, heads, d]`.

    query: `[1, heads, tokens, d]`; key and value likewise. Raises `NotImplementedError` where a model asks for more
    than plain attention.
    """
    special = sorted(name for name in _SPECIAL_ATTENTION if options.get(name) is not None)
    if attention_mask is not None or special:
        raise NotImplementedError(f"packed attention knows no {', '.join(special) or 'mask'}")
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    attended = packed_attention(q, k, v, packing, causal=causal, scale=scaling)
    return attended[None], None


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
